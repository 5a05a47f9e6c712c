// SPDX-License-Identifier: Apache-2.0
//
// Included before every text that NVRTC compiles: what other compilers have built in and NVRTC lacks.
#pragma once

#define __builtin_huge_valf() __builtin_bit_cast(float, 0x7f800000)
#define __builtin_huge_val() __builtin_bit_cast(double, 0x7ff0000000000000ll)
#define __builtin_nanf(text) __builtin_bit_cast(float, 0x7fc00000)
