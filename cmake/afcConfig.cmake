# SPDX-License-Identifier: Apache-2.0
#
# Attentions as libraries of a CMake project:
#
#   find_package(afc REQUIRED CONFIG)       # cmake -Dafc_DIR=$(afc config cmake)
#   afc_add_attention(lm SOURCE lm.attn BACKEND cpu DTYPE float32 HEAD 64)
#   target_link_libraries(my_program PRIVATE lm)
#
# my_program then includes "lm.h" and calls lm_<attention>_<backend>_<dtype>_<Dqk>_<Dv>_forward and the like. It is
# built again when the source, or a file that it imports, changes.
#
#   afc_add_attention(<target> SOURCE <file>
#                     [BACKEND <cpu|cuda>...] [ARCH <sm_90>...] [DTYPE <float32>...] [HEAD <D>...]
#                     [DEFINE <parameter=value>...] [OPTIONS <argument of afc compile>...])
#
# AFC_COMMAND is how afc is run: by default the program `afc`, else `python3 -m afc`.
cmake_minimum_required(VERSION 3.20)

if(NOT AFC_COMMAND)
  find_program(AFC_EXECUTABLE afc)
  mark_as_advanced(AFC_EXECUTABLE)
  if(AFC_EXECUTABLE)
    set(AFC_COMMAND "${AFC_EXECUTABLE}")
  else()
    find_package(Python3 QUIET COMPONENTS Interpreter)
    if(Python3_EXECUTABLE)
      set(AFC_COMMAND "${Python3_EXECUTABLE};-m;afc")
    endif()
  endif()
endif()
set(AFC_COMMAND "${AFC_COMMAND}" CACHE STRING "How afc is run")
get_filename_component(AFC_INCLUDE_DIR "${CMAKE_CURRENT_LIST_DIR}/../runtime" ABSOLUTE)

if(NOT TARGET afc::abi)
  add_library(afc::abi INTERFACE IMPORTED GLOBAL)
  target_include_directories(afc::abi INTERFACE "${AFC_INCLUDE_DIR}")
endif()

function(afc_add_attention target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "SOURCE" "BACKEND;ARCH;DTYPE;HEAD;DEFINE;OPTIONS")
  if(NOT AFC_COMMAND)
    message(FATAL_ERROR "afc_add_attention(${target}): neither afc nor Python was found; set AFC_COMMAND")
  endif()
  if(NOT arg_SOURCE)
    message(FATAL_ERROR "afc_add_attention(${target}): SOURCE is missing")
  endif()
  if(arg_UNPARSED_ARGUMENTS OR arg_KEYWORDS_MISSING_VALUES)
    message(FATAL_ERROR "afc_add_attention(${target}): unknown or empty: ${arg_UNPARSED_ARGUMENTS} "
                        "${arg_KEYWORDS_MISSING_VALUES}")
  endif()
  get_filename_component(source "${arg_SOURCE}" ABSOLUTE BASE_DIR "${CMAKE_CURRENT_SOURCE_DIR}")
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/afc/${target}")
  set(options)
  foreach(pair "BACKEND;--backend" "ARCH;--arch" "DTYPE;--dtype")
    list(GET pair 0 name)
    list(GET pair 1 option)
    if(arg_${name})
      string(REPLACE ";" "," values "${arg_${name}}")
      list(APPEND options ${option} "${values}")
    endif()
  endforeach()
  if(arg_HEAD)
    string(REPLACE ";" "," heads "${arg_HEAD}")
    list(APPEND options -D "D=${heads}")
  endif()
  foreach(define ${arg_DEFINE})
    list(APPEND options -D "${define}")
  endforeach()

  file(MAKE_DIRECTORY "${folder}")
  add_custom_command(
    OUTPUT "${folder}/${target}.so" "${folder}/${target}.h"
    COMMAND ${AFC_COMMAND} compile "${source}" -o "${folder}/${target}.so" --no-python --header
            "${folder}/${target}.h" --depfile "${folder}/${target}.d" ${options} ${arg_OPTIONS}
    DEPENDS "${source}"
    DEPFILE "${folder}/${target}.d"
    COMMENT "Compiling attention ${arg_SOURCE}"
    VERBATIM)
  add_custom_target(${target}_build DEPENDS "${folder}/${target}.so" "${folder}/${target}.h")
  add_library(${target} SHARED IMPORTED GLOBAL)
  set_target_properties(${target} PROPERTIES IMPORTED_LOCATION "${folder}/${target}.so")
  target_include_directories(${target} INTERFACE "${folder}")
  target_link_libraries(${target} INTERFACE afc::abi)
  add_dependencies(${target} ${target}_build)
endfunction()
