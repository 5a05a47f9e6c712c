// ============================================================================
// afc: attention `learned_sink` for target sm86, GPUs with at least 99 KB of shared memory a block
// source    learned_sink.attn:2
// blocks    causal > sliding_window(w = 128) > softmax_sink(sink = sink)
// tensors   q[B, H, M, 128], k[B, Hk, N, 128], v[B, Hk, N, 128], o[B, H, M, 128] bfloat16
// options   sink[H] float
// schedule  host code: launches the kernels in order
// rebuild   afc compile learned_sink.attn --emit cu
// edit      templates/sm80, grammar/prelude
// ============================================================================
#include "abi/afc_abi.h"
#include "abi/afc_shares.h"
#include "host/driver.h"
#include "host/gradients.h"
#include "host/status.h"

extern "C" const afc_gpu_images learned_sink_cuda_bfloat16_128_128_sm86_images;  // one cubin per architecture

namespace {

// ---- kernels ---------------------------------------------------------------

enum Kernel {
  LEARNED_SINK_FORWARD,
  LEARNED_SINK_CLEAR,
  LEARNED_SINK_PREPROCESS,
  LEARNED_SINK_BACKWARD,
  LEARNED_SINK_POSTPROCESS,
  LEARNED_SINK_CAPTURED,
  LEARNED_SINK_CAPTURED_SUM,
  LEARNED_SINK_BACKWARD_QUERIES,
};

const afc_gpu_kernel kernels[] = {  // symbol, dynamic shared memory, threads, part of the image
    {"learned_sink_forward", 98304, 256, 0},
    {"learned_sink_clear", 0, 256, 1},
    {"learned_sink_preprocess", 0, 256, 1},
    {"learned_sink_backward", 82432, 256, 1},
    {"learned_sink_postprocess", 16896, 256, 1},
    {"learned_sink_captured", 512, 128, 1},
    {"learned_sink_captured_sum", 0, 256, 1},
    {"learned_sink_backward_queries", 65536, 128, 1},
};

afc_gpu_module gpu = {&learned_sink_cuda_bfloat16_128_128_sm86_images, kernels, 8};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// ---- shares of the kernels that sum gradients of captured tensors -----------

// How the blocks of learned_sink_captured share out its rows.
AFC_FN void learned_sink_captured_shares(const afc_args &args, Shares &shares) {
  shares.begin(args.B, args.Hq, (args.M + 63) / 64);
  shares.add(args.grad_captured[0], -1, 0, -1, args.M);  // sink
  shares.split();
}

Shares shares_of(void (*compute)(const afc_args &, Shares &), const afc_args &args) {
  Shares shares;
  compute(args, shares);
  return shares;
}

int launch(Kernel kernel, int64_t x, int64_t y, const afc_args &args) {
  if (x > 2147483647) {
    return afc_fail(AFC_BAD_ARGUMENT, "the call needs %lld blocks, more than one grid holds", (long long)x);
  }
  return afc_gpu_launch(&gpu, kernel, unsigned(x), unsigned(y), 1, &args, 0);
}

// ---- checks ----------------------------------------------------------------

int check_rows(const char *name, const afc_tensor &tensor, int64_t elements) {
  if (elements == 0) return AFC_OK;
  const bool unit_stride = tensor.stride[3] == 1;
  const bool multiples = (tensor.stride[0] | tensor.stride[1] | tensor.stride[2]) % 8 == 0;
  if (tensor.data == nullptr || (uintptr_t)tensor.data % 16 != 0 || !unit_stride || !multiples) {
    return afc_fail(AFC_BAD_ARGUMENT,
                    "%s: expected 16-byte aligned rows: a pointer aligned to 16 bytes, strides that are "
                    "multiples of 8 and a unit last stride",
                    name);
  }
  return AFC_OK;
}

int check(const afc_args &args, bool backward) {
  const int64_t q_rows = args.B * args.Hq * args.M, k_rows = args.B * args.Hk * args.N;
  const int64_t q_size = q_rows * 128, k_size = k_rows * 128;
  const int64_t o_size = q_rows * 128, v_size = k_rows * 128;
  if (args.flags & AFC_ACCUMULATE) {
    return afc_fail(AFC_UNSUPPORTED, "flags: AFC_ACCUMULATE is not supported by this module");
  }
  if (args.o_raw.data != nullptr) {
    return afc_fail(AFC_UNSUPPORTED, "o_raw: this attention has no output block, must be null");
  }
  for (int n = 0; n < AFC_MAX_CAPTURED; ++n) {
    if (args.grad_captured[n].data != nullptr && !(backward && (n == 0))) {
      return afc_fail(AFC_UNSUPPORTED, "grad_captured[%d]: this module computes no gradient of this captured tensor", n);
    }
    if ((n < 1) != (args.captured[n].data != nullptr)) {
      return afc_fail(AFC_BAD_ARGUMENT, "captured[%d]: this attention captures 1 tensor(s)", n);
    }
  }
  if (const int dtype = args.captured[0].dtype; !(dtype >= AFC_FLOAT16 && dtype <= AFC_FLOAT64)) {
    return afc_fail(AFC_BAD_ARGUMENT, "sink: expected elements of type float16, bfloat16, float32 or float64");
  }
  if (int status = afc_check_gradient(args, 0, AFC_FLOAT32)) return status;
  if (gradient_size(args.grad_captured[0]) > 2147483647) {
    return afc_fail(AFC_UNSUPPORTED, "grad_captured[0]: expected at most 2147483647 elements");
  }
  if (int status = check_rows("q", args.q, q_size)) return status;
  if (int status = check_rows("k", args.k, k_size)) return status;
  if (int status = check_rows("v", args.v, v_size)) return status;
  if (int status = check_rows("o", args.o, o_size)) return status;
  if (!backward) return AFC_OK;
  if (int status = check_rows("d_o", args.d_o, o_size)) return status;
  if (int status = check_rows("dq", args.dq, q_size)) return status;
  if (int status = check_rows("dk", args.dk, k_size)) return status;
  if (int status = check_rows("dv", args.dv, v_size)) return status;
  return AFC_OK;
}

// ---- workspace -------------------------------------------------------------

// Sets args.buffer to parts of the workspace; returns the bytes that they take.
int64_t place(afc_args &args, bool backward) {
  int64_t at = 0;
  auto take = [&](int index, bool needed, int64_t bytes) {
    if (!needed) return;
    args.buffer[index] = (void *)((uintptr_t)args.workspace + (uintptr_t)at);
    at += ceil_div(bytes, 256) * 256;
  };
  take(0, backward, 4 * (args.B * args.Hq * args.M * 2));  // row_terms
  take(1, backward, 4 * (args.B * args.Hq * ((args.M + 15) / 16 * 2048)));  // dq_sum
  take(2, backward, 4 * (shares_of(learned_sink_captured_shares, args).floats()));  // copies of learned_sink_captured
  return at;
}

int start(afc_args &args, bool backward) {
  if (int status = check(args, backward)) return status;
  const int64_t needed = place(args, backward);
  if (args.workspace_bytes < needed) {
    return afc_fail(AFC_BAD_ARGUMENT, "workspace: expected %lld bytes, got %lld", (long long)needed,
                    (long long)args.workspace_bytes);
  }
  return AFC_OK;
}

}  // namespace

// ---- entry functions -------------------------------------------------------

extern "C" int64_t learned_sink_cuda_bfloat16_128_128_sm86_workspace(const afc_args *call, int backward) {
  afc_args args = *call;
  return place(args, backward != 0);
}

extern "C" int learned_sink_cuda_bfloat16_128_128_sm86_forward(const afc_args *call) {
  afc_args args = *call;
  if (int status = start(args, false)) return status;
  if (int status = launch(LEARNED_SINK_FORWARD, (args.M + 127) / 128 * args.Hq * args.B, 1, args)) {
    return status;
  }
  return AFC_OK;
}

extern "C" int learned_sink_cuda_bfloat16_128_128_sm86_backward(const afc_args *call) {
  afc_args args = *call;
  if (int status = start(args, true)) return status;
  if (args.flags & AFC_DETERMINISTIC) {
    if (int status = launch(LEARNED_SINK_CLEAR, 256, 1, args)) return status;
    if (int status = launch(LEARNED_SINK_PREPROCESS, (args.M + 31) / 32 * args.Hq * args.B, 1, args)) return status;
    if (int status = launch(LEARNED_SINK_BACKWARD, (args.N + 127) / 128 * args.Hk * args.B, 1, args)) return status;
    if (int status = launch(LEARNED_SINK_BACKWARD_QUERIES, (args.M + 63) / 64 * args.Hq * args.B, 1, args)) return status;
    if (int status = launch(LEARNED_SINK_CAPTURED, shares_of(learned_sink_captured_shares, args).wanted_blocks(), 1, args)) return status;
    if (int status = launch(LEARNED_SINK_CAPTURED_SUM, ceil_div(shares_of(learned_sink_captured_shares, args).largest(), 8), 1, args)) return status;
    return AFC_OK;
  }
  if (int status = launch(LEARNED_SINK_CLEAR, 256, 1, args)) {
    return status;
  }
  if (int status = launch(LEARNED_SINK_PREPROCESS, (args.M + 31) / 32 * args.Hq * args.B, 1, args)) {
    return status;
  }
  if (int status = launch(LEARNED_SINK_BACKWARD, (args.N + 127) / 128 * args.Hk * args.B, 1, args)) {
    return status;
  }
  if (int status = launch(LEARNED_SINK_POSTPROCESS, (args.M + 31) / 32 * args.Hq * args.B, 1, args)) {
    return status;
  }
  if (int status = launch(LEARNED_SINK_CAPTURED, shares_of(learned_sink_captured_shares, args).wanted_blocks(), 1, args)) {
    return status;
  }
  if (int status = launch(LEARNED_SINK_CAPTURED_SUM, ceil_div(shares_of(learned_sink_captured_shares, args).largest(), 8), 1, args)) {
    return status;
  }
  return AFC_OK;
}
