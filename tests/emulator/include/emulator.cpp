// SPDX-License-Identifier: Apache-2.0
//
// The machine: fibers, warps, barriers, asynchronous copies, and the launch that host code calls.
#include "emulator.hpp"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <deque>
#include <vector>

#include "host/driver.h"
#include "host/status.h"

thread_local __attribute__((aligned(1024))) unsigned char shared_memory[emulator::SHARED_BYTES];

// Saves the callee-saved registers and the stack pointer to *from, and goes on from `to`.
extern "C" void afc_emulator_switch(void **from, void *to);
asm(R"(
    .text
    .globl afc_emulator_switch
    .hidden afc_emulator_switch
    .type afc_emulator_switch, @function
afc_emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size afc_emulator_switch, .-afc_emulator_switch
)");

namespace emulator {

thread_local Index thread_index, block_index, block_size, grid_size;

namespace {

constexpr size_t STACK_BYTES = 256 * 1024;
constexpr int LANES = 32;

struct Copy {
  unsigned char *destination;
  const void *source;
  uint32_t bytes;
  bool valid;
  int group;
};

enum class State { READY, IN_WARP, IN_BLOCK, ENDED };

struct Fiber {
  void *stack_pointer;
  unsigned char *stack;
  Index index;
  State state;
  std::deque<Copy> copies;
  int groups;
};

// A meeting of the lanes of one warp, by the mask they name.
struct Meeting {
  uint32_t mask, arrived;
  void (*combine)(void **, uint32_t);
  void *operand[LANES];
};

struct Warp {
  std::vector<Meeting> meetings;
};

struct Machine {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  int current = 0, live = 0, in_block = 0, predicates = 0, last_predicates = 0;
  void *scheduler = nullptr;
  uint64_t random = 1;
  uint32_t shared_bytes = 0;
  bool failed = false;
  char message[1024];
  void (*run)(afc_args) = nullptr;
  const afc_args *args = nullptr;

  uint32_t next_random() {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return uint32_t(random >> 32);
  }
};

thread_local Machine *machine;

void to_scheduler() {
  Fiber &fiber = machine->fibers[size_t(machine->current)];
  afc_emulator_switch(&fiber.stack_pointer, machine->scheduler);
}

void wake_block() {
  machine->last_predicates = machine->predicates;
  machine->in_block = machine->predicates = 0;
  for (Fiber &fiber : machine->fibers)
    if (fiber.state == State::IN_BLOCK) fiber.state = State::READY;
}

extern "C" void afc_emulator_enter() {
  machine->run(*machine->args);
  Fiber &fiber = machine->fibers[size_t(machine->current)];
  fiber.state = State::ENDED;
  --machine->live;
  if (machine->live > 0 && machine->in_block == machine->live) wake_block();
  to_scheduler();
  abort();
}

void prepare(Fiber &fiber) {
  auto **top = reinterpret_cast<void **>(fiber.stack + STACK_BYTES - 64);
  *--top = nullptr;  // the return address of afc_emulator_enter, which never returns; keeps the ABI's alignment
  *--top = reinterpret_cast<void *>(&afc_emulator_enter);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
  fiber.state = State::READY;
  fiber.copies.clear();
  fiber.groups = 0;
}

// Runs every fiber of a block to its end. False: an error, or nobody can go on.
bool run_block() {
  const int count = int(machine->fibers.size());
  for (Fiber &fiber : machine->fibers) prepare(fiber);
  for (Warp &warp : machine->warps) warp.meetings.clear();
  machine->live = count;
  machine->in_block = machine->predicates = 0;
  while (machine->live > 0) {
    bool any = false;
    const int warps = int(machine->warps.size());
    const int first = int(machine->next_random() % unsigned(warps));
    for (int w = 0; w < warps; ++w) {
      const int begin = (first + w) % warps * LANES, end = begin + LANES < count ? begin + LANES : count;
      bool progress = true;
      while (progress) {  // a warp goes on until all its lanes wait for other warps
        progress = false;
        for (int f = begin; f < end; ++f) {
          Fiber &fiber = machine->fibers[size_t(f)];
          if (fiber.state != State::READY) continue;
          progress = any = true;
          machine->current = f;
          thread_index = fiber.index;
          afc_emulator_switch(&machine->scheduler, fiber.stack_pointer);
          if (machine->failed) return false;
        }
        if (machine->next_random() % 64 == 0) break;  // other warps may overtake
      }
    }
    if (!any) {
      snprintf(machine->message, sizeof machine->message,
               "block (%u, %u): %d threads wait for ever, %d of them at a barrier of the block", block_index.x,
               block_index.y, machine->live, machine->in_block);
      return false;
    }
  }
  return true;
}

}  // namespace

void fail(const char *format, ...) {
  const int written = snprintf(machine->message, sizeof machine->message, "block (%u, %u), thread %u: ", block_index.x,
                               block_index.y, thread_index.x);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(machine->message + written, sizeof machine->message - size_t(written), format, arguments);
  va_end(arguments);
  machine->failed = true;
  to_scheduler();
  abort();
}

void meet(uint32_t mask, void (*combine)(void **, uint32_t), void *mine) {
  const int lane = machine->current % LANES;
  Warp &warp = machine->warps[size_t(machine->current / LANES)];
  if (!(mask >> lane & 1)) fail("lane %d is not in the mask %08x that it names", lane, mask);
  size_t slot = 0;
  while (slot < warp.meetings.size() && !(warp.meetings[slot].mask & mask)) ++slot;
  if (slot == warp.meetings.size()) warp.meetings.push_back(Meeting{mask, 0, combine, {}});
  Meeting &meeting = warp.meetings[slot];
  if (meeting.mask != mask) fail("lanes meet with different masks: %08x and %08x", meeting.mask, mask);
  if (meeting.combine != combine) fail("lanes of a warp meet at different operations");
  meeting.arrived |= 1u << lane;
  meeting.operand[lane] = mine;
  if (meeting.arrived != mask) {
    machine->fibers[size_t(machine->current)].state = State::IN_WARP;
    to_scheduler();
    return;
  }
  combine(meeting.operand, mask);
  const int first = machine->current / LANES * LANES;
  for (int other = 0; other < LANES; ++other)
    if (mask >> other & 1) machine->fibers[size_t(first + other)].state = State::READY;
  warp.meetings.erase(warp.meetings.begin() + long(slot));
}

int meet_block(bool predicate) {
  machine->predicates += predicate;
  if (++machine->in_block == machine->live) {
    wake_block();
  } else {
    machine->fibers[size_t(machine->current)].state = State::IN_BLOCK;
    to_scheduler();
  }
  return machine->last_predicates;
}

void yield() { to_scheduler(); }

uint32_t shared_offset(const void *pointer) {
  return uint32_t(static_cast<const unsigned char *>(pointer) - shared_memory);
}

unsigned char *shared_pointer(uint32_t offset, uint32_t bytes) {
  if (offset % bytes != 0) fail("shared memory: offset %u is not aligned to %u bytes", offset, bytes);
  // Variables of a kernel that are declared apart lie elsewhere.
  if (offset < SHARED_BYTES && offset + bytes > machine->shared_bytes) {
    fail("shared memory: %u bytes at %u, beyond the %u of the block", bytes, offset, machine->shared_bytes);
  }
  return shared_memory + int32_t(offset);
}

void copy_start(uint32_t destination, const void *source, uint32_t bytes, bool valid) {
  Fiber &fiber = machine->fibers[size_t(machine->current)];
  unsigned char *to = shared_pointer(destination, bytes);
  if (valid && reinterpret_cast<uintptr_t>(source) % bytes != 0) {
    fail("cp.async: source %p is not aligned to %u bytes", source, bytes);
  }
  memset(to, 0xff, bytes);
  fiber.copies.push_back({to, source, bytes, valid, fiber.groups});
}

void copy_commit() { ++machine->fibers[size_t(machine->current)].groups; }

void copy_wait(int pending) {
  Fiber &fiber = machine->fibers[size_t(machine->current)];
  while (!fiber.copies.empty() && fiber.copies.front().group < fiber.groups - pending) {
    const Copy &copy = fiber.copies.front();
    if (copy.valid) {
      memcpy(copy.destination, copy.source, copy.bytes);
    } else {
      memset(copy.destination, 0, copy.bytes);
    }
    fiber.copies.pop_front();
  }
}

namespace {

void (*find(const Kernels &kernels, const char *symbol))(afc_args) {
  for (int i = 0; i < kernels.count; ++i)
    if (strcmp(kernels.first[i].symbol, symbol) == 0) return kernels.first[i].run;
  return nullptr;
}

bool run_grid(const afc_gpu_kernel &kernel) {
  constexpr unsigned char GUARD = 0xa5;
  for (unsigned z = 0; z < grid_size.z; ++z)
    for (unsigned y = 0; y < grid_size.y; ++y)
      for (unsigned x = 0; x < grid_size.x; ++x) {
        block_index = {x, y, z};
        memset(shared_memory, 0xff, size_t(kernel.shared_bytes));
        memset(shared_memory + kernel.shared_bytes, GUARD, 4096);
        if (!run_block()) return false;
        for (int i = 0; i < 4096; ++i)
          if (shared_memory[kernel.shared_bytes + i] != GUARD) {
            snprintf(machine->message, sizeof machine->message,
                     "block (%u, %u): byte %d behind the shared memory of the block was written", x, y, i);
            return false;
          }
      }
  return true;
}

}  // namespace
}  // namespace emulator

extern "C" int afc_gpu_launch(afc_gpu_module *module, int kernel_index, unsigned x, unsigned y, unsigned z,
                              const afc_args *args, int) {
  using namespace emulator;
  if (x == 0 || y == 0 || z == 0) return AFC_OK;
  const afc_gpu_kernel &kernel = module->kernels[kernel_index];
  auto run = find(*reinterpret_cast<const Kernels *>(module->images), kernel.symbol);
  if (run == nullptr) return afc_fail(AFC_NO_KERNEL_FOR_DEVICE, "emulator: no kernel %s", kernel.symbol);
  const int limit = 99 * 1024;  // compute capability 8.6
  if (kernel.shared_bytes > limit) {
    return afc_fail(AFC_DRIVER_ERROR, "emulator: %s: %d bytes of shared memory", kernel.symbol, kernel.shared_bytes);
  }
  Machine own;
  machine = &own;
  own.run = run;
  own.args = args;
  own.shared_bytes = uint32_t(kernel.shared_bytes);
  const char *seed = getenv("AFC_EMULATOR_SEED");
  own.random = 0x9e3779b97f4a7c15u ^ (seed ? strtoull(seed, nullptr, 10) : 0);
  own.fibers.resize(size_t(kernel.threads));
  own.warps.resize(size_t(kernel.threads + LANES - 1) / LANES);
  const size_t bytes = STACK_BYTES * size_t(kernel.threads);
  void *stacks = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (stacks == MAP_FAILED) return afc_fail(AFC_DRIVER_ERROR, "emulator: no memory for %zu bytes of stacks", bytes);
  for (int t = 0; t < kernel.threads; ++t) {
    own.fibers[size_t(t)].stack = static_cast<unsigned char *>(stacks) + STACK_BYTES * size_t(t);
    own.fibers[size_t(t)].index = {unsigned(t), 0, 0};
  }
  block_size = {unsigned(kernel.threads), 1, 1};
  grid_size = {x, y, z};
  const bool done = run_grid(kernel);
  munmap(stacks, bytes);
  machine = nullptr;
  if (done) return AFC_OK;
  return afc_fail(AFC_DRIVER_ERROR, "emulator: %s: %s", kernel.symbol, own.message);
}

extern "C" int afc_gpu_query(int, afc_gpu_device *out) {
  *out = {86, 82, 99 * 1024};
  return AFC_OK;
}
