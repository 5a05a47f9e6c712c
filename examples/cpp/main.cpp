// SPDX-License-Identifier: Apache-2.0
//
// Causal attention from C++, forward and backward, on the CPU or a GPU: the results are compared with the same
// mathematics in double precision. Prints the errors; exits with 1 if one is larger than rounding to bfloat16 explains.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <random>
#include <vector>

#include "abi/afc_call.hpp"
#include "lm.h"

#ifdef ATTEND_ON_CUDA
#include <cuda_runtime_api.h>
#define LM(function) lm_causal_lm_cuda_bfloat16_64_64_##function
constexpr int kDevice = 0;
void *allocate(size_t bytes) {  // memory that both processors see
  void *memory = nullptr;
  if (cudaMallocManaged(&memory, bytes) != cudaSuccess) throw std::bad_alloc();
  return memory;
}
void release(void *memory) { cudaFree(memory); }
bool finish() { return cudaDeviceSynchronize() == cudaSuccess; }
#else
#define LM(function) lm_causal_lm_cpu_bfloat16_64_64_##function
constexpr int kDevice = -1;
void *allocate(size_t bytes) {
  void *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void release(void *memory) { free(memory); }
bool finish() { return true; }
#endif

namespace {

constexpr int64_t B = 2, Hq = 4, Hk = 2, N = 100, D = 64;

uint16_t to_bf16(double value) {  // to nearest, ties to even
  const float rounded = static_cast<float>(value);
  uint32_t bits;
  memcpy(&bits, &rounded, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

double from_bf16(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  memcpy(&result, &bits, sizeof(result));
  return result;
}

// A contiguous [B, heads, N, D] tensor of bfloat16.
class Tensor {
 public:
  explicit Tensor(int64_t heads) : heads_(heads), data_(allocate(B * heads * N * D * 2), release) {}
  afc_tensor view() const { return afc::tensor(data_.get(), heads_, N, D); }
  uint16_t &at(int64_t b, int64_t h, int64_t n, int64_t d) const {
    return static_cast<uint16_t *>(data_.get())[((b * heads_ + h) * N + n) * D + d];
  }
  double operator()(int64_t b, int64_t h, int64_t n, int64_t d) const { return from_bf16(at(b, h, n, d)); }
  Tensor &fill(uint32_t seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < B * heads_ * N * D; ++i) static_cast<uint16_t *>(data_.get())[i] = to_bf16(normal(generator));
    return *this;
  }

 private:
  int64_t heads_;
  std::unique_ptr<void, void (*)(void *)> data_;
};

// Attention in double precision, of what the rounded inputs hold.
struct Reference {
  std::vector<double> o, dq, dk, dv, lse;

  Reference(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &d_o)
      : o(B * Hq * N * D), dq(o.size()), dk(B * Hk * N * D), dv(dk.size()), lse(B * Hq * N) {
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t h = 0; h < Hq; ++h) {
        for (int64_t i = 0; i < N; ++i) row(q, k, v, d_o, b, h, i);
      }
    }
  }

  void row(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &d_o, int64_t b, int64_t h, int64_t i) {
    const int64_t g = h / (Hq / Hk);  // the key head of this query head
    const double scale = 1.0 / sqrt(double(D));
    std::vector<double> p(i + 1), dp(i + 1);
    double sum = 0, delta = 0;
    for (int64_t j = 0; j <= i; ++j) {
      double s = 0;
      for (int64_t d = 0; d < D; ++d) {
        s += q(b, h, i, d) * k(b, g, j, d);
        dp[j] += d_o(b, h, i, d) * v(b, g, j, d);
      }
      sum += p[j] = exp(s * scale);
    }
    const int64_t here = (b * Hq + h) * N + i;
    lse[here] = log(sum);
    for (int64_t j = 0; j <= i; ++j) delta += (p[j] /= sum) * dp[j];
    for (int64_t j = 0; j <= i; ++j) {
      const double ds = p[j] * (dp[j] - delta) * scale;
      const int64_t there = ((b * Hk + g) * N + j) * D;
      for (int64_t d = 0; d < D; ++d) {
        o[here * D + d] += p[j] * v(b, g, j, d);
        dv[there + d] += p[j] * d_o(b, h, i, d);
        dq[here * D + d] += ds * k(b, g, j, d);
        dk[there + d] += ds * q(b, h, i, d);
      }
    }
  }
};

// The largest error, in units of bfloat16's rounding (2^-8) of the largest element.
bool close(const char *name, const std::vector<double> &want, const uint16_t *got) {
  double error = 0, largest = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double difference = fabs(want[i] - from_bf16(got[i]));
    if (!(difference <= error)) error = difference;  // also where it is NaN
    largest = fmax(largest, fabs(want[i]));
  }
  const double units = error / largest * 256;
  printf("%s: largest error %.2g, %.2f units of rounding\n", name, error, units);
  return units <= 2.0;  // rounding of P and dS on the way, and of the result
}

void run(int (*function)(const afc_args *), afc_args args, bool backward) {
  const size_t bytes = afc::workspace(LM(workspace), args, backward, lm_last_error);
  std::unique_ptr<void, void (*)(void *)> room(allocate(bytes), release);
  afc::place(&args, room.get(), bytes);
  afc::call(function, args, lm_last_error);
  if (!finish()) throw std::runtime_error("the GPU reports an error");
}

}  // namespace

int main() {
  try {
    Tensor q(Hq), k(Hk), v(Hk), o(Hq), d_o(Hq), dq(Hq), dk(Hk), dv(Hk);
    std::unique_ptr<float, void (*)(void *)> lse(static_cast<float *>(allocate(B * Hq * N * sizeof(float))), release);
    afc_args args = afc::arguments(B, Hq, Hk, N, N, kDevice);
    args.q = q.fill(1).view();
    args.k = k.fill(2).view();
    args.v = v.fill(3).view();
    args.o = o.view();
    args.lse = afc::tensor(lse.get(), Hq, N, 1);
    run(LM(forward), args, false);

    args.d_o = d_o.fill(4).view();
    args.dq = dq.view();
    args.dk = dk.view();
    args.dv = dv.view();
    run(LM(backward), args, true);

    const Reference want(q, k, v, d_o);
    bool good = close("o", want.o, &o.at(0, 0, 0, 0));
    good = close("dq", want.dq, &dq.at(0, 0, 0, 0)) && good;
    good = close("dk", want.dk, &dk.at(0, 0, 0, 0)) && good;
    good = close("dv", want.dv, &dv.at(0, 0, 0, 0)) && good;
    for (int64_t i = 0; i < B * Hq * N; ++i) good = fabs(lse.get()[i] - want.lse[i]) < 1e-4 && good;

    args.num_splits = 2;  // a field that this module does not support is an error by name
    if (LM(forward)(&args) == AFC_OK) return 1;
    printf("refused: %s\n", lm_last_error());
    return good ? 0 : 1;
  } catch (const std::exception &error) {
    fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
