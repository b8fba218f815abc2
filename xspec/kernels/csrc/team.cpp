#include "team.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace xs {
namespace {

// About 20 us: a barrier inside a pass is passed within a few, the next pass is rarely that near.
constexpr int kSpins = 2000;
// While spinning does not pay: as good as none.
constexpr int kFewSpins = 20;
constexpr int kMostFailures = 6;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  (void)word, (void)value;  // the caller looks again
  std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

// Returns once `word` is no longer `value`; true if that took no sleep.
bool wait_change(std::atomic<uint32_t>& word, uint32_t value, int spins, std::atomic<int>& sleeping) {
  for (int spin = 0; spin < spins; ++spin) {
    if (word.load(std::memory_order_acquire) != value) return true;
    pause();
  }
  sleeping.fetch_add(1);
  while (word.load() == value) sleep_while(word, value);
  sleeping.fetch_sub(1);
  return false;
}

void change(std::atomic<uint32_t>& word, std::atomic<int>& sleeping) {
  word.fetch_add(1);
  if (sleeping.load() > 0) wake_all(word);
}

}  // namespace

int64_t Worker::next() { return team->ticket_.fetch_add(1, std::memory_order_relaxed); }

void Worker::barrier() { team->arrive(index); }

void* Worker::scratch(size_t bytes) {
  Team::Scratch& own = team->scratch_[index];
  if (own.bytes < bytes) {
    std::free(own.memory);
    own.bytes = (bytes + bytes / 4 + 63) / 64 * 64;
    own.memory = std::aligned_alloc(64, own.bytes);
    if (own.memory == nullptr) std::abort();
  }
  return own.memory;
}

int Team::Patience::spins() {
  if (resting == 0) return kSpins;
  --resting;
  return kFewSpins;
}

void Team::Patience::learn(int spins, bool passed) {
  if (spins != kSpins) return;
  failures = passed ? 0 : std::min(failures + 1, kMostFailures);
  resting = passed ? 0 : 1 << failures;
}

Team::Team(int threads) : count_(threads < 1 ? 1 : threads), scratch_(count_), patience_(count_) {
  try {
    for (int index = 1; index < count_; ++index) threads_.emplace_back([this, index] { serve(index); });
  } catch (...) {  // the system has no more threads: those that run must end before their memory does
    stop();
    throw;
  }
}

Team::~Team() {
  stop();
  for (auto& own : scratch_) std::free(own.memory);
}

void Team::stop() {
  stopping_ = true;
  change(started_, sleeping_);
  for (auto& thread : threads_) thread.join();
}

void Team::run(const std::function<void(Worker&)>& job) {
  ticket_.store(0, std::memory_order_relaxed);
  Worker caller{0, count_, this};
  if (count_ == 1) {
    job(caller);
    return;
  }
  job_ = &job;
  change(started_, sleeping_);
  job(caller);
  arrive(0);
}

void Team::serve(int index) {
  uint32_t seen = 0;
  Worker worker{index, count_, this};
  while (true) {
    wait_change(started_, seen, kSpins, sleeping_);
    ++seen;
    if (stopping_) return;
    (*job_)(worker);
    arrive(index);
  }
}

void Team::arrive(int index) {
  if (count_ == 1) {
    ticket_.store(0, std::memory_order_relaxed);
    return;
  }
  const uint32_t phase = phase_.load();
  if (waiting_.fetch_add(1) + 1 == count_) {
    waiting_.store(0);
    ticket_.store(0);
    change(phase_, sleeping_);
  } else {
    Patience& own = patience_[index];
    const int spins = own.spins();
    own.learn(spins, wait_change(phase_, phase, spins, sleeping_));
  }
}

}  // namespace xs
