// ============================================================================
// afc: attention `bigbird_encoder` for target sm86, GPUs with at least 99 KB of shared memory a block
// source    bigbird.attn:2
// blocks    bigbird(pick = pick, block = block) > softmax
// tensors   q[B, H, M, 128], k[B, Hk, N, 128], v[B, Hk, N, 128], o[B, H, M, 128] bfloat16
// options   pick[H, MB, 3] int, block: int > 0
// schedule  host code: launches the kernels in order
// rebuild   afc compile bigbird.attn --emit cu
// edit      templates/sm80, grammar/prelude
// ============================================================================
#include "abi/afc_abi.h"
#include "host/driver.h"
#include "host/status.h"

extern "C" const afc_gpu_images bigbird_encoder_cuda_bfloat16_128_128_sm86_images;  // one cubin per architecture

namespace {

// ---- kernels ---------------------------------------------------------------

enum Kernel {
  BIGBIRD_ENCODER_PLAN_KEYS_OF_128_BY_64,
  BIGBIRD_ENCODER_FORWARD,
  BIGBIRD_ENCODER_PLAN_QUERIES_OF_128_BY_32,
  BIGBIRD_ENCODER_PREPROCESS,
  BIGBIRD_ENCODER_BACKWARD,
  BIGBIRD_ENCODER_POSTPROCESS,
  BIGBIRD_ENCODER_PLAN_KEYS_OF_64_BY_32,
  BIGBIRD_ENCODER_BACKWARD_QUERIES,
};

const afc_gpu_kernel kernels[] = {  // symbol, dynamic shared memory, threads, part of the image
    {"bigbird_encoder_plan_keys_of_128_by_64", 0, 128, 0},
    {"bigbird_encoder_forward", 98304, 256, 0},
    {"bigbird_encoder_plan_queries_of_128_by_32", 0, 128, 1},
    {"bigbird_encoder_preprocess", 0, 256, 1},
    {"bigbird_encoder_backward", 82432, 256, 1},
    {"bigbird_encoder_postprocess", 16896, 256, 1},
    {"bigbird_encoder_plan_keys_of_64_by_32", 0, 128, 1},
    {"bigbird_encoder_backward_queries", 65536, 128, 1},
};

afc_gpu_module gpu = {&bigbird_encoder_cuda_bfloat16_128_128_sm86_images, kernels, 8};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

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
    if (args.grad_captured[n].data != nullptr) {
      return afc_fail(AFC_UNSUPPORTED, "grad_captured[%d]: this module computes no gradient of captured tensors", n);
    }
    if ((n < 1) != (args.captured[n].data != nullptr)) {
      return afc_fail(AFC_BAD_ARGUMENT, "captured[%d]: this attention captures 1 tensor(s)", n);
    }
  }
  if (const int dtype = args.captured[0].dtype; !(dtype == AFC_INT32 || dtype == AFC_INT64)) {
    return afc_fail(AFC_BAD_ARGUMENT, "pick: expected elements of type int32 or int64");
  }
  if (!(args.scalar[0].i > 0 && args.scalar[0].i < 1073741824)) {
    return afc_fail(AFC_BAD_ARGUMENT, "block: expected an int above 0 and below 1073741824");
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
  take(2, !backward, 16 * (args.B * args.Hq * ((args.M + 127) / 128) * 64));  // keys_of_128_by_64
  take(3, backward, 16 * (args.B * args.Hq * ((args.N + 127) / 128) * 64));  // queries_of_128_by_32
  take(4, backward, 16 * (args.B * args.Hq * ((args.M + 63) / 64) * 64));  // keys_of_64_by_32
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

extern "C" int64_t bigbird_encoder_cuda_bfloat16_128_128_sm86_workspace(const afc_args *call, int backward) {
  afc_args args = *call;
  return place(args, backward != 0);
}

extern "C" int bigbird_encoder_cuda_bfloat16_128_128_sm86_forward(const afc_args *call) {
  afc_args args = *call;
  if (int status = start(args, false)) return status;
  if (int status = launch(BIGBIRD_ENCODER_PLAN_KEYS_OF_128_BY_64, ((args.M + 127) / 128 * args.B * args.Hq + 3) / 4, 1, args)) {
    return status;
  }
  if (int status = launch(BIGBIRD_ENCODER_FORWARD, (args.M + 127) / 128 * args.Hq * args.B, 1, args)) {
    return status;
  }
  return AFC_OK;
}

extern "C" int bigbird_encoder_cuda_bfloat16_128_128_sm86_backward(const afc_args *call) {
  afc_args args = *call;
  if (int status = start(args, true)) return status;
  if (args.flags & AFC_DETERMINISTIC) {
    if (int status = launch(BIGBIRD_ENCODER_PLAN_QUERIES_OF_128_BY_32, ((args.N + 127) / 128 * args.B * args.Hq + 3) / 4, 1, args)) return status;
    if (int status = launch(BIGBIRD_ENCODER_PLAN_KEYS_OF_64_BY_32, ((args.M + 63) / 64 * args.B * args.Hq + 3) / 4, 1, args)) return status;
    if (int status = launch(BIGBIRD_ENCODER_PREPROCESS, (args.M + 31) / 32 * args.Hq * args.B, 1, args)) return status;
    if (int status = launch(BIGBIRD_ENCODER_BACKWARD, (args.N + 127) / 128 * args.Hk * args.B, 1, args)) return status;
    if (int status = launch(BIGBIRD_ENCODER_BACKWARD_QUERIES, (args.M + 63) / 64 * args.Hq * args.B, 1, args)) return status;
    return AFC_OK;
  }
  if (int status = launch(BIGBIRD_ENCODER_PLAN_QUERIES_OF_128_BY_32, ((args.N + 127) / 128 * args.B * args.Hq + 3) / 4, 1, args)) {
    return status;
  }
  if (int status = launch(BIGBIRD_ENCODER_PREPROCESS, (args.M + 31) / 32 * args.Hq * args.B, 1, args)) {
    return status;
  }
  if (int status = launch(BIGBIRD_ENCODER_BACKWARD, (args.N + 127) / 128 * args.Hk * args.B, 1, args)) {
    return status;
  }
  if (int status = launch(BIGBIRD_ENCODER_POSTPROCESS, (args.M + 31) / 32 * args.Hq * args.B, 1, args)) {
    return status;
  }
  return AFC_OK;
}
