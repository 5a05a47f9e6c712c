// SPDX-License-Identifier: Apache-2.0
//
// Launching GPU kernels through the CUDA driver, for generated host code. Neither cuda.h nor cudart is needed
// to build, and libcuda.so.1 is opened at the first launch.
//
//   extern "C" const afc_gpu_images llama_images;             // the cubins, placed by the build
//   static const afc_gpu_kernel kernels[] = {{"llama_forward", kForwardSharedBytes, kForwardThreads}};
//   static afc_gpu_module gpu = {&llama_images, kernels, 1};
//   ...
//   return afc_gpu_launch(&gpu, 0, grid_x, grid_y, grid_z, &args, 0);
#ifndef AFC_HOST_DRIVER_H
#define AFC_HOST_DRIVER_H

#include <stddef.h>

#include "abi/afc_abi.h"

// One compiled image, or a part of one: those of a table that are equal in all but their code hold the kernels
// together. `arch` is ten times the compute capability that the code was made for, `virtual_arch`
// that of the features it uses (compute_86 built for sm_90: arch 90, virtual_arch 86).
struct afc_gpu_image {
  int arch;
  int virtual_arch;
  char suffix;  // 'a': for this capability only; 'f': for its family; 0: for later minors too
  bool ptx;     // text for the driver's own compiler, terminated by a zero byte; otherwise a cubin
  int toolkit;  // version of CUDA that made it, as the driver counts: 13000 for 13.0; 0 if not known
  const unsigned char *begin;
  size_t bytes;
};

struct afc_gpu_images {
  const afc_gpu_image *first;
  int count;
};

// One kernel of every image of a module; its only parameter is an afc_args by value.
struct afc_gpu_kernel {
  const char *symbol;
  int shared_bytes;  // dynamic shared memory
  int threads;       // of one block
  int part = 0;      // of an image in parts, that which holds it
};

struct afc_gpu_state;

// One of several forms of the same functions: its images, and the shared memory of a block that the GPUs
// have which it was made for.
struct afc_gpu_variant {
  const afc_gpu_images *images;
  int shared_bytes;
};

// A set of kernels in one or more images. Zero the rest: it is filled at the first launch.
struct afc_gpu_module {
  const afc_gpu_images *images;
  const afc_gpu_kernel *kernels;
  int kernel_count;
  afc_gpu_state *state = nullptr;
};

// What a schedule may ask about a device.
struct afc_gpu_device {
  int arch;  // ten times the compute capability
  int multiprocessors;
  int shared_bytes;  // largest dynamic shared memory of one block
};

extern "C" {
// Launches kernels[kernel_index] with a grid of (x, y, z) blocks on args->stream of args->device. Never
// synchronises. `dependent_launch` lets the grid start before its predecessor in the stream has ended: the
// kernel itself waits (compute capability 9.0 and later; elsewhere it starts after the predecessor). A grid
// with a zero size launches nothing. Returns a status; the text is kept for afc_last_error().
int afc_gpu_launch(afc_gpu_module *module, int kernel_index, unsigned x, unsigned y, unsigned z,
                   const afc_args *args, int dependent_launch);

// Finds the variant for a device ordinal: the first (they are in order, the best first) whose class the
// device belongs to and which has machine code that runs there, else the first with PTX for it. Where there
// is none, one that runs if its kernels need less than their class may: the launch says if they do not.
// Returns a status.
int afc_gpu_choose(const afc_gpu_variant *variants, int count, int device, int *chosen);

// Fills `out` for a device ordinal; returns a status.
int afc_gpu_query(int device, afc_gpu_device *out);
}

#endif  // AFC_HOST_DRIVER_H
