// What the files of the C interface share: its export mark, error codes, the team's handle and the guard.
#pragma once

#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#include "linear_int.h"
#include "ops.h"
#include "sample.h"

#if defined(_WIN32)
#define XS_API extern "C" __declspec(dllexport)
#else
#define XS_API extern "C" __attribute__((visibility("default")))
#endif

namespace xs {

enum Status : int32_t {
  kOk = 0,
  kInvalid = 1,   // an argument cannot be: null, negative, or of a shape that does not fit
  kNoMemory = 2,
  kForked = 3,    // the team's threads live in the process this one was forked from
  kFailed = 4,
};

inline int64_t process_id() {
#if defined(__unix__) || defined(__APPLE__)
  return static_cast<int64_t>(getpid());
#else
  return 0;
#endif
}

}  // namespace xs

struct XsTeam {
  XsTeam(int threads, const xs::Ops& chosen) : team(threads), ops(chosen) {}

  // Activations of an int linear that is called on its own.
  xs::Quantised quantised(int64_t rows, int64_t in) {
    const size_t groups = static_cast<size_t>(rows * (in / xs::kIntGroup));
    const size_t values = (static_cast<size_t>(rows * in) + 63) / 64 * 64;
    const size_t bytes = values + 2 * groups * sizeof(float) + 64;
    if (bytes > buffer_bytes) {
      buffer.reset(static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
      buffer_bytes = buffer == nullptr ? 0 : bytes;
      if (buffer == nullptr) throw std::bad_alloc();
    }
    float* floats = reinterpret_cast<float*>(buffer.get() + values);
    return xs::Quantised{reinterpret_cast<int8_t*>(buffer.get()), floats, floats + groups};
  }

  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };

  // For work that is done before another thread would have woken.
  xs::Team& hands(int64_t elements) { return elements <= (1 << 15) ? solo : team; }

  xs::Team team, solo{1};
  const xs::Ops& ops;
  xs::Sampler sampler;
  std::mutex busy;
  const int64_t process = xs::process_id();
  std::unique_ptr<char, Free> buffer;
  size_t buffer_bytes = 0;
};

// Runs `call` alone on the team and turns what it throws into a status.
template <typename Call>
int32_t guarded(XsTeam* team, const Call& call) {
  if (team == nullptr) return xs::kInvalid;
  if (team->process != xs::process_id()) return xs::kForked;
  try {
    const std::lock_guard<std::mutex> alone(team->busy);
    call();
    return xs::kOk;
  } catch (const std::bad_alloc&) {
    return xs::kNoMemory;
  } catch (...) {
    return xs::kFailed;
  }
}
