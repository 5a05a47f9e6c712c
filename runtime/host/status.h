// SPDX-License-Identifier: Apache-2.0
//
// Errors of the calling thread, and the guard through which every entry function is called.
//
// A function that fails ends with `return afc_fail(AFC_BAD_ARGUMENT, "q: ...", ...);` and passes the status
// on unchanged.
#ifndef AFC_HOST_STATUS_H
#define AFC_HOST_STATUS_H

#include "abi/afc_abi.h"

extern "C" {
// Keeps status and text for afc_last_error() of this thread; returns status. Text beyond 2047 bytes is cut.
int afc_fail(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));

// Status of the last failure in this thread since afc_clear_error(); AFC_OK if there was none.
int afc_last_status(void);

void afc_clear_error(void);

// Calls `function` after the checks that hold for every entry: version and size of the structure, known
// flags, sizes, positions below 2^30 in size (generated code subtracts them in 32 bits), reserved fields zero. C++
// exceptions become a status.
int afc_call(int (*function)(const afc_args *args), const afc_args *args);

// The same for an entry's workspace function; -1 on failure, 0 where there is no such function.
int64_t afc_call_workspace(int64_t (*function)(const afc_args *args, int backward), const afc_args *args,
                           int backward);
}

#endif  // AFC_HOST_STATUS_H
