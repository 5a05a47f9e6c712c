// SPDX-License-Identifier: Apache-2.0
//
// Which indices a task visits, and how tasks are spread over threads.
#ifndef AFC_CPU_WALK_HPP
#define AFC_CPU_WALK_HPP

#include <omp.h>

#include "abi/afc_run.h"
#include "math.hpp"

namespace afc {

using ::Run;
using ::Runs;

// The part of a run below index `end`.
AFC_FN Run run_below(const Run &run, int64_t end) {
  const auto cut = [end](int index) { return int(min(int64_t(index), end)); };
  return Run{cut(run.begin), cut(run.full_begin), cut(run.full_end), cut(run.end)};
}

// Calls visit(first, count, full) for pieces of at most `tile` indices: first those that need the element
// test, then the full ones. A piece never straddles the border between the two.
template <class Visit> AFC_FN void walk(const Run &run, int tile, Visit visit) {
  const int segments[3][2] = {
      {run.begin, run.full_begin}, {run.full_end, run.end}, {run.full_begin, run.full_end}};
  for (int k = 0; k < 3; ++k) {
    for (int64_t first = segments[k][0]; first < segments[k][1]; first += tile) {
      visit(int(first), int(min(int64_t(tile), segments[k][1] - first)), k == 2);
    }
  }
}

// The same of several runs; some may become empty.
template <int N> AFC_FN Runs<N> run_below(Runs<N> runs, int64_t end) {
  for (int k = 0; k < runs.count; ++k) runs.run[k] = run_below(runs.run[k], end);
  return runs;
}

// The same walk over several runs, one after the other.
template <int N, class Visit> AFC_FN void walk(const Runs<N> &runs, int tile, Visit visit) {
  for (int k = 0; k < runs.count; ++k) walk(runs.run[k], tile, visit);
}

// A compiler that makes two copies of a task, one for each loop below, contracts and vectorises each as it likes:
// results would differ in the last bit between one thread and several.
#if defined(__clang__)
#define AFC_ONE_COPY __attribute__((noinline))
#else
#define AFC_ONE_COPY __attribute__((noinline, noclone))
#endif

template <class Task> AFC_ONE_COPY void run_task(Task &task, int64_t index, int thread) { task(index, thread); }

// Calls task(index, thread) for every index below `tasks`. One thread means no OpenMP team at all: a child of
// fork() would wait for ever for the threads of its parent's team.
template <class Task> AFC_FN void parallel_for(int threads, int64_t tasks, Task task) {
  const int team = int(min(int64_t(threads), tasks));
  if (team <= 1) {
    for (int64_t index = 0; index < tasks; ++index) run_task(task, index, 0);
    return;
  }
#pragma omp parallel for schedule(dynamic) num_threads(team)
  for (int64_t index = 0; index < tasks; ++index) run_task(task, index, omp_get_thread_num());
}

}  // namespace afc
#endif  // AFC_CPU_WALK_HPP
