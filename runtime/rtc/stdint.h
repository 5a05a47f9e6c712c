// SPDX-License-Identifier: Apache-2.0
//
// <stdint.h> for NVRTC, which has no system headers: the types that device code uses, as Linux declares them on 64-bit
// machines, so that the same overloads are chosen as under nvcc.
#pragma once

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef long intptr_t;
typedef unsigned long uintptr_t;
static_assert(sizeof(int64_t) == 8 && sizeof(uintptr_t) == sizeof(void *), "a 64-bit machine");

#define INT32_MIN (-2147483647 - 1)
#define INT32_MAX 2147483647
#define UINT32_MAX 4294967295u
#define INT64_MAX 9223372036854775807l
#define INT64_MIN (-INT64_MAX - 1)
#define UINT64_MAX 18446744073709551615ul
