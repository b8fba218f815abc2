// A small team of threads that runs one function together: work by ticket, phases parted by barriers.
//
// Waiting threads spin briefly, then sleep, so a busy neighbour costs its share of a core and no more.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace xs {

class Team;

// One thread of a running team. Every worker runs the same function with the same arguments.
struct Worker {
  int index;  // 0: the thread that called run()
  int count;
  Team* team;

  // The next ticket of this phase: 0, 1, 2, ... over all workers, each once.
  int64_t next();
  // Waits for all workers; what they wrote before is visible after it, and tickets start at 0 again.
  void barrier();
  // Private memory, 64-byte aligned, at least `bytes` long. What was in it before is lost.
  void* scratch(size_t bytes);
};

class Team {
 public:
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int threads() const { return count_; }
  // Runs `job` on every thread of the team, the caller among them; returns when all are done.
  // One caller at a time. Memory that scratch() gave lives until the next run.
  void run(const std::function<void(Worker&)>& job);

 private:
  friend struct Worker;
  struct Scratch {
    void* memory = nullptr;
    size_t bytes = 0;
  };

  // How long a worker spins at barriers: not for a while once it was in vain, ever longer if it is again.
  // Beside a busy neighbour the others may wait for the very core that it spins on.
  struct alignas(64) Patience {
    int failures = 0;  // in a row
    int resting = 0;   // barriers to come without spinning

    int spins();
    void learn(int spins, bool passed);
  };

  void serve(int index);
  void stop();
  void arrive(int index);

  const int count_;
  std::vector<std::thread> threads_;
  std::vector<Scratch> scratch_;
  std::vector<Patience> patience_;
  const std::function<void(Worker&)>* job_ = nullptr;
  bool stopping_ = false;
  alignas(64) std::atomic<uint32_t> started_{0};  // jobs handed out; sleepers wait on it
  alignas(64) std::atomic<uint32_t> phase_{0};    // barriers passed; sleepers wait on it
  alignas(64) std::atomic<int> waiting_{0};       // workers at the present barrier
  alignas(64) std::atomic<int64_t> ticket_{0};
  alignas(64) std::atomic<int> sleeping_{0};
};

}  // namespace xs
