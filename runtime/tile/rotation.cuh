// SPDX-License-Identifier: Apache-2.0
//
// Rotations of row pairs by 2x2 matrices from a table. A rotation type R says which columns (FIRST, PAIRS, ADJACENT),
// how many numbers a matrix has in the table (COEFFICIENTS), and how they make up its entries (a00..a11).
// Every placement of a rotation goes through rotate() or rotate_back(), with these roundings, so all agree bit by bit.
#pragma once
#include "element.cuh"
#include "shared_tile.cuh"

namespace tile {

template <class R>
AFC_FN void rotate(float &x0, float &x1, const float *c) {
  const float y0 = __fmaf_rn(x0, R::a00(c), __fmul_rn(x1, R::a01(c)));
  const float y1 = __fmaf_rn(x0, R::a10(c), __fmul_rn(x1, R::a11(c)));
  x0 = y0;
  x1 = y1;
}

// The transposed matrix: what maps the gradient of a rotated row to that of the row.
template <class R>
AFC_FN void rotate_back(float &x0, float &x1, const float *c) {
  const float y0 = __fmaf_rn(x0, R::a00(c), __fmul_rn(x1, R::a10(c)));
  const float y1 = __fmaf_rn(x0, R::a01(c), __fmul_rn(x1, R::a11(c)));
  x0 = y0;
  x1 = y1;
}

template <class R>
AFC_FN void load_coefficients(float (&c)[R::COEFFICIENTS], const float *row, int pair) {
  const float *from = row + pair * R::COEFFICIENTS;
  if constexpr (R::COEFFICIENTS == 2) {
    const float2 v = *reinterpret_cast<const float2 *>(from);
    c[0] = v.x, c[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < R::COEFFICIENTS; ++i) c[i] = from[i];
  }
}

template <class R>
AFC_FN int first_column(int pair) {
  return R::ADJACENT ? R::FIRST + 2 * pair : R::FIRST + pair;
}

template <class R>
AFC_FN int second_column(int pair) {
  return R::ADJACENT ? R::FIRST + 2 * pair + 1 : R::FIRST + R::PAIRS + pair;
}

// Pairs are rotated in units as large as their place in a row permits: eight pairs that are two chunks of 16 bytes
// (half-split), four pairs in one chunk (neighbours), or a single pair.
template <class R>
struct Unit {
  static constexpr bool HALVES = !R::ADJACENT && R::FIRST % 8 == 0 && R::PAIRS % 8 == 0;
  static constexpr bool CHUNK = R::ADJACENT && R::FIRST % 8 == 0 && R::PAIRS % 4 == 0;
  static constexpr int PAIRS = HALVES ? 8 : CHUNK ? 4 : 1;
  static constexpr int PER_ROW = R::PAIRS / PAIRS;

  float c[PAIRS][R::COEFFICIENTS];

  AFC_FN void load(const float *table_row, int pair) {
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) load_coefficients<R>(c[p], table_row, pair + p);
  }
};

// The elements of a unit from pair `pair` on. `source(column)` and `destination(column)` are addresses of 16-bit elements.
template <class E, class R>
struct UnitData {
  using U = Unit<R>;
  uint32_t x[U::HALVES ? 8 : U::CHUNK ? 4 : 1];  // halves: first members, then second ones; else pairs

  template <class Source> AFC_FN void load(Source source, int pair) {
    if constexpr (U::HALVES) {
      const uint4 low = *reinterpret_cast<const uint4 *>(source(R::FIRST + pair));
      const uint4 high = *reinterpret_cast<const uint4 *>(source(R::FIRST + R::PAIRS + pair));
      x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    } else if constexpr (U::CHUNK) {
      const uint4 chunk = *reinterpret_cast<const uint4 *>(source(R::FIRST + 2 * pair));
      x[0] = chunk.x, x[1] = chunk.y, x[2] = chunk.z, x[3] = chunk.w;
    } else {
      const uint32_t second = *reinterpret_cast<const uint16_t *>(source(second_column<R>(pair)));
      x[0] = *reinterpret_cast<const uint16_t *>(source(first_column<R>(pair))) | second << 16;
    }
  }

  AFC_FN void turn(const U &unit) {
    if constexpr (U::HALVES) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        float x0 = unpack_low<E>(x[w]), x1 = unpack_high<E>(x[w]), y0 = unpack_low<E>(x[w + 4]), y1 = unpack_high<E>(x[w + 4]);
        rotate<R>(x0, y0, unit.c[2 * w]);
        rotate<R>(x1, y1, unit.c[2 * w + 1]);
        x[w] = E::pack(x0, x1), x[w + 4] = E::pack(y0, y1);
      }
    } else {
#pragma unroll
      for (int w = 0; w < U::PAIRS; ++w) {
        float x0 = unpack_low<E>(x[w]), x1 = unpack_high<E>(x[w]);
        rotate<R>(x0, x1, unit.c[w]);
        x[w] = E::pack(x0, x1);
      }
    }
  }

  template <class Destination> AFC_FN void store(Destination destination, int pair) const {
    if constexpr (U::HALVES) {
      *reinterpret_cast<uint4 *>(destination(R::FIRST + pair)) = {x[0], x[1], x[2], x[3]};
      *reinterpret_cast<uint4 *>(destination(R::FIRST + R::PAIRS + pair)) = {x[4], x[5], x[6], x[7]};
    } else if constexpr (U::CHUNK) {
      *reinterpret_cast<uint4 *>(destination(R::FIRST + 2 * pair)) = {x[0], x[1], x[2], x[3]};
    } else {
      *reinterpret_cast<uint16_t *>(destination(first_column<R>(pair))) = static_cast<uint16_t>(x[0]);
      *reinterpret_cast<uint16_t *>(destination(second_column<R>(pair))) = static_cast<uint16_t>(x[0] >> 16);
    }
  }
};

// Rotates the first `rows` rows of a tile in place. Coefficients that fit in registers are read ahead, while the tile is
// on its way. `table` is the table row of tile row 0.
template <class E, class Tile, class R, int THREADS>
struct TileRotation {
  static constexpr int UNITS = (Tile::ROWS * Unit<R>::PER_ROW + THREADS - 1) / THREADS;  // of a thread
  static constexpr bool AHEAD = UNITS * Unit<R>::PAIRS * R::COEFFICIENTS <= 64;

  const float *table;
  int rows;
  Unit<R> units[AHEAD ? UNITS : 1];

  AFC_FN TileRotation(const float *table_, int rows_) : table(table_), rows(rows_) {
    if constexpr (AHEAD) {
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
        const int index = u * THREADS + threadIdx.x;
        read(units[u], min(index, rows * Unit<R>::PER_ROW - 1));
      }
    }
  }

  // The caller synchronises before and after.
  AFC_FN void apply(unsigned char *tile) {
    if constexpr (AHEAD) {
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
        const int index = u * THREADS + threadIdx.x;
        if (index < rows * Unit<R>::PER_ROW) rotate(tile, index, units[u]);
      }
    } else {
      for (int index = threadIdx.x; index < rows * Unit<R>::PER_ROW; index += THREADS) {
        read(units[0], index);
        rotate(tile, index, units[0]);
      }
    }
  }

 private:
  AFC_FN void read(Unit<R> &unit, int index) const {
    const int row = index / Unit<R>::PER_ROW, pair = index % Unit<R>::PER_ROW * Unit<R>::PAIRS;
    unit.load(table + static_cast<int64_t>(row) * R::STRIDE, pair);
  }

  AFC_FN static void rotate(unsigned char *tile, int index, const Unit<R> &unit) {
    const int row = index / Unit<R>::PER_ROW, pair = index % Unit<R>::PER_ROW * Unit<R>::PAIRS;
    const auto address = [&](int column) { return tile + Tile::offset(row, column); };
    UnitData<E, R> data;
    data.load(address, pair);
    data.turn(unit);
    data.store(address, pair);
  }
};

// Computes the coefficients of `rows` rows into `coefficients` [rows][PAIRS * COEFFICIENTS], one pair at a time: they
// are long double-precision code with calls in it, across which little should be kept. Copies them to the table where
// `write_table`, which is the same for all threads. They are visible to all threads afterwards.
// compute(row, pair, c) gives those of a pair, table(row) the address of a row of the table.
template <class R, int THREADS, class Compute, class Table>
AFC_FN void fill_coefficients(float *coefficients, int rows, bool write_table, Compute compute, Table table) {
  constexpr uint32_t ROW_FLOATS = R::PAIRS * R::COEFFICIENTS;
  const int pairs = rows * R::PAIRS;
#pragma unroll 1
  for (int index = threadIdx.x; index < pairs; index += THREADS) {
    const uint32_t row = static_cast<uint32_t>(index) / R::PAIRS, pair = static_cast<uint32_t>(index) % R::PAIRS;
    float c[R::COEFFICIENTS];
    compute(static_cast<int>(row), static_cast<int>(pair), c);
#pragma unroll
    for (int i = 0; i < R::COEFFICIENTS; ++i) coefficients[index * R::COEFFICIENTS + i] = c[i];
  }
  __syncthreads();
  if (!write_table) return;
  for (int index = threadIdx.x; index < pairs * R::COEFFICIENTS; index += THREADS) {
    const uint32_t row = static_cast<uint32_t>(index) / ROW_FLOATS;
    table(static_cast<int>(row))[static_cast<uint32_t>(index) % ROW_FLOATS] = coefficients[index];
  }
}

// The coefficients of rows [first_row, first_row + rows) for batch entry b and head h of the operand.
template <class R, int THREADS>
AFC_FN void compute_coefficients(float *coefficients, const afc_args &args, int b, int h, int origin, int first_row,
                                 int rows, bool write_table) {
  fill_coefficients<R, THREADS>(
      coefficients, rows, write_table,
      [&](int row, int pair, float *c) {
        R::coefficients(args, b, h, first_row + row, origin + first_row + row, pair, c);
      },
      [&](int row) { return R::table(args, b, h, first_row + row); });
}

// (batch, head)s as indices b * heads + h: `first`, `first + step`, ... below `end`.
struct Members {
  int first, end, step;
};

// The coefficient tables of an operand: one for the call, or one for each batch entry, each head, or both.
struct Tables {
  int batches, heads;
  bool by_batch, by_head;

  AFC_FN int count() const { return (by_batch ? batches : 1) * (by_head ? heads : 1); }
  AFC_FN int64_t of(int b, int h) const { return (by_batch ? int64_t(b) * (by_head ? heads : 1) : 0) + (by_head ? h : 0); }

  // Batch entry and head for which table `table` is computed, 0 where they do not matter.
  AFC_FN int batch(int table) const { return !by_batch ? 0 : by_head ? table / heads : table; }
  AFC_FN int head(int table) const { return !by_head ? 0 : by_batch ? table % heads : table; }

  // What table `table` serves, in `parts` parts.
  AFC_FN Members members(int table, int part, int parts) const {
    const int step = by_head ? heads : 1, first = (by_batch ? batch(table) * heads : 0) + head(table);
    return {first + part * step, by_batch ? (batch(table) + 1) * heads : batches * heads, parts * step};
  }
};

// Whether any batch entry has keys from row `first` on.
AFC_FN bool keys_in_use(const afc_args &args, int first) {
  if (args.kv_len_per_batch == nullptr) return true;
  for (int batch = 0; batch < args.B; ++batch)
    if (args.kv_len_per_batch[batch] > first) return true;
  return false;
}

// Rotates rows [first_row, first_row + rows) of `members`, at most ROWS; rows from lengths[batch] on are not there, where
// lengths are given. Threads that the units of the rows leave over share the members.
template <class E, class R, int THREADS, int ROWS>
AFC_FN void rotate_rows(const afc_tensor &x, const afc_tensor &rotated, const float *coefficients, int first_row,
                        int rows, int heads, const Members &members, const int64_t *lengths) {
  constexpr int UNITS = ROWS * Unit<R>::PER_ROW, PARTS = UNITS < THREADS ? THREADS / UNITS : 1;
  constexpr int TOGETHER = PARTS > 1 ? UNITS : THREADS;  // threads that work on one member
  constexpr int BATCH = 4;                               // members whose elements are on their way at once
  const int part = PARTS > 1 ? threadIdx.x / TOGETHER : 0;
  if (part >= PARTS) return;
  for (int index = threadIdx.x % TOGETHER; index < rows * Unit<R>::PER_ROW; index += TOGETHER) {
    const int row = index / Unit<R>::PER_ROW, pair = index % Unit<R>::PER_ROW * Unit<R>::PAIRS;
    Unit<R> unit;
    unit.load(coefficients + row * (R::PAIRS * R::COEFFICIENTS), pair);
#pragma unroll 1
    for (int first = members.first + part * members.step; first < members.end; first += BATCH * PARTS * members.step) {
      UnitData<E, R> data[BATCH];
      unsigned char *to[BATCH];  // null where there is nothing to rotate
#pragma unroll
      for (int u = 0; u < BATCH; ++u) {
        const int wanted = first + u * PARTS * members.step, batch_head = wanted < members.end ? wanted : first;
        const int batch = batch_head / heads, head = batch_head - batch * heads;
        const bool there = wanted < members.end && (lengths == nullptr || first_row + row < lengths[batch]);
        to[u] = there ? row_address(rotated, batch, head, first_row + row) : nullptr;
        const unsigned char *from = row_address(x, batch, head, first_row + row);
        data[u].load([&](int column) { return from + column * 2; }, pair);
      }
#pragma unroll
      for (int u = 0; u < BATCH; ++u) {
        if (to[u] == nullptr) continue;
        data[u].turn(unit);
        data[u].store([&](int column) { return to[u] + column * 2; }, pair);
      }
    }
  }
}

// Copies the columns [FIRST, FIRST + COUNT) that no rotation touches; the arguments are those of rotate_rows.
template <int FIRST, int COUNT, int THREADS>
AFC_FN void copy_columns(const afc_tensor &x, const afc_tensor &copy, int first_row, int rows, int heads,
                         const Members &members, const int64_t *lengths) {
  constexpr int SIZE = FIRST % 8 == 0 && COUNT % 8 == 0 ? 8 : 1;
  for (int index = threadIdx.x; index < rows * (COUNT / SIZE); index += THREADS) {
    const int row = first_row + index / (COUNT / SIZE), column = FIRST + index % (COUNT / SIZE) * SIZE;
    for (int batch_head = members.first; batch_head < members.end; batch_head += members.step) {
      const int batch = batch_head / heads, head = batch_head - batch * heads;
      if (lengths != nullptr && row >= lengths[batch]) continue;
      const unsigned char *from = row_address(x, batch, head, row) + column * 2;
      unsigned char *to = row_address(copy, batch, head, row) + column * 2;
      if constexpr (SIZE == 8) {
        *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(from);
      } else {
        *reinterpret_cast<uint16_t *>(to) = *reinterpret_cast<const uint16_t *>(from);
      }
    }
  }
}

// Rotates float32 rows in shared memory back, in place; `pitch` floats to the next row.
template <class R, int THREADS>
AFC_FN void rotate_rows_back(float *rows_data, int pitch, const float *table, int rows) {
  constexpr int BATCH = 8;  // pairs whose coefficients are on their way at once
  const int pairs = rows * R::PAIRS;
#pragma unroll 1
  for (int first = threadIdx.x; first < pairs; first += BATCH * THREADS) {
    float c[BATCH][R::COEFFICIENTS];
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
      const int index = min(first + u * THREADS, pairs - 1);
      load_coefficients<R>(c[u], table + static_cast<int64_t>(index / R::PAIRS) * R::STRIDE, index % R::PAIRS);
    }
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
      const int index = first + u * THREADS, pair = index % R::PAIRS;
      float *row = rows_data + index / R::PAIRS * pitch;
      if (index < pairs) rotate_back<R>(row[first_column<R>(pair)], row[second_column<R>(pair)], c[u]);
    }
  }
}

// Rotates an accumulator back in registers: possible because both members of a pair are in one lane when halves are
// whole octets apart, or neighbours. `table` belongs to row 0. Column block c of the accumulator is column block
// first_block + c * STEP of the row.
template <class R, int STEP, int ROW_BLOCKS, int OCTETS>
AFC_FN void rotate_accumulator_back(float (&acc)[ROW_BLOCKS][OCTETS][4], int first_block, const float *table,
                                    int first_row, int rows) {
  constexpr int SHIFT = R::ADJACENT ? 0 : R::PAIRS / 8 / STEP;  // octets, in this warp, to the second member
  constexpr int COLUMNS = R::ADJACENT ? 2 * R::PAIRS : R::PAIRS;
  static_assert(R::FIRST % 8 == 0 && COLUMNS % 8 == 0, "rotated columns must be whole octets");
  static_assert(R::ADJACENT || STEP == 1 || R::PAIRS % (16 * STEP) == 0, "the partner must belong to the same warp");
  if (rows <= 0) return;
  // Column, less FIRST, of the first member of the pairs of octet o; outside [0, COLUMNS) there are none.
  const auto column_of = [=](int o) { return (first_block + o / 2 * STEP) * 16 + o % 2 * 8 - R::FIRST; };
  // The coefficients of all rows are on their way at once, if they fit in registers; else those of one row.
  constexpr int ROWS = 2 * ROW_BLOCKS, COPIES = R::ADJACENT ? 1 : 2;
  constexpr int TOGETHER = ROWS * (OCTETS - SHIFT) * COPIES * R::COEFFICIENTS <= 64 ? ROWS : 1;
#pragma unroll
  for (int first = 0; first < ROWS; first += TOGETHER) {
    float c[TOGETHER][OCTETS - SHIFT][COPIES][R::COEFFICIENTS];
#pragma unroll
    for (int k = 0; k < TOGETHER; ++k) {
      const int row = min(first_row + (first + k) * 8 + fragment_row(), rows - 1);
      const float *table_row = table + static_cast<int64_t>(row) * R::STRIDE;
#pragma unroll
      for (int o = 0; o + SHIFT < OCTETS; ++o) {
        const int column = min(max(column_of(o), 0), COLUMNS - 8) + fragment_column();
#pragma unroll
        for (int copy = 0; copy < COPIES; ++copy)
          load_coefficients<R>(c[k][o][copy], table_row, R::ADJACENT ? column / 2 : column + copy);
      }
    }
#pragma unroll
    for (int k = 0; k < TOGETHER; ++k) {
      const int r = (first + k) / 2, half = (first + k) % 2;
      const bool there = first_row + (first + k) * 8 + fragment_row() < rows;
#pragma unroll
      for (int o = 0; o + SHIFT < OCTETS; ++o) {
        if (!there || column_of(o) < 0 || column_of(o) >= COLUMNS) continue;
        float *x = &acc[r][o][2 * half], *y = &acc[r][o + SHIFT][2 * half];
        if constexpr (R::ADJACENT) {
          rotate_back<R>(x[0], x[1], c[k][o][0]);
        } else {
          rotate_back<R>(x[0], y[0], c[k][o][0]);
          rotate_back<R>(x[1], y[1], c[k][o][1]);
        }
      }
    }
  }
}

}  // namespace tile
