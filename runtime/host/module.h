// SPDX-License-Identifier: Apache-2.0
//
// The Python side of a module. The generated stub's initialisation function is `return afc_host_init(&table,
// "<stem>");`.
#ifndef AFC_HOST_MODULE_H
#define AFC_HOST_MODULE_H

#include "abi/afc_abi.h"

struct _object;  // PyObject: the stub is compiled without Python's headers

extern "C" {
// Returns the definition of the module (multi-phase initialisation), or null with a Python exception set.
struct _object *afc_host_init(const afc_module *table, const char *stem);
}

#endif  // AFC_HOST_MODULE_H
