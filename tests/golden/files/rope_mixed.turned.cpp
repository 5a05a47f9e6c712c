// ---- backward: captured tensors that rotations read -------------------------

const afc::CapturedGradient Q_TURNED_GRADIENTS[] = {
    {0, {-1, 0, -1}},  // fx
    {1, {-1, 0, -1}},  // fy
};
constexpr int Q_TURNED = 2;
using QTurnedShares = afc::Shares<Q_TURNED>;

// The arguments with the heads and rows of q as those over which work is split.
AFC_FN afc_args q_as_rows(const afc_args &args) {
  afc_args rows = args;
  rows.Hq = args.Hq;
  rows.M = args.M;
  return rows;
}

QTurnedShares q_turned_shares(const afc_args &args) {
  return afc::share_out(q_as_rows(args), Q_TURNED_GRADIENTS, afc::ceil_div(args.M, QUERY_TILE));
}

// What one task adds: row after row, the steps of q forward on the raw row, then back on the gradient.
AFC_FN void q_turned_task(const afc_args &call, const Workspace &w, const QTurnedShares &shares, int64_t task) {
  double *copies = w.q_turned_copies + task * shares.copy_size;
  std::memset(copies, 0, size_t(shares.copy_size) * sizeof(double));
  afc::CapturedSum<Real> gradients[Q_TURNED];
  for (int k = 0; k < Q_TURNED; ++k) {
    const afc_captured &gradient = call.grad_captured[Q_TURNED_GRADIENTS[k].slot];
    gradients[k] = {shares.copied[k] ? copies + shares.start[k] : nullptr, static_cast<Real *>(gradient.data)};
  }
  afc::visit_tiles(q_as_rows(call), shares, task, afc::ceil_div(call.M, QUERY_TILE), [&](int64_t b64, int64_t h64, int64_t tile) {
    afc_args own;
    const afc_args &args = afc::args_of_batch(call, b64, own);
    const int b = int(b64), h = int(h64);
    const int64_t first = tile * QUERY_TILE, last = afc::min(first + QUERY_TILE, args.M);
    for (int64_t r64 = first; r64 < last; ++r64) {
      const int r = int(r64), position = int(r + args.q_origin);
      const Real *table = q_table_row(args, w, b, h, r);
      Real row[HEAD_QK];
      std::memcpy(row, w.q_turned + ((b64 * args.Hq + h64) * args.M + r64) * HEAD_QK, sizeof row);
      if (afc::is_zero(row, HEAD_QK)) continue;  // nothing arrives at a row that is masked, whatever it holds
      Real before[1][HEAD_QK];  // the row ahead of each step
      afc::load_row(before[0], afc::matrix<const Element>(w.q_raw, b, h).row(r), HEAD_QK);
      for (int pair = 0; pair < 32; ++pair) {
        const Real x0 = before[0][0 + 2 * pair], x1 = before[0][0 + 2 * pair + 1];
        const Real d0 = row[0 + 2 * pair], d1 = row[0 + 2 * pair + 1];
        if (d0 == Real(0) && d1 == Real(0)) continue;
        gradients[0].add(rotate_q_offset_0_0(args, b, h, r, position, pair), rotate_q_gradient_0_0(args, b, h, r, position, pair, x0, x1, d0, d1));
        gradients[1].add(rotate_q_offset_0_1(args, b, h, r, position, pair), rotate_q_gradient_0_1(args, b, h, r, position, pair, x0, x1, d0, d1));
      }
    }
  });
}

const afc::CapturedGradient K_TURNED_GRADIENTS[] = {
    {0, {-1, 0, -1}, true},  // fx
    {1, {-1, 0, -1}, true},  // fy
};
constexpr int K_TURNED = 2;
using KTurnedShares = afc::Shares<K_TURNED>;

// The arguments with the heads and rows of k as those over which work is split.
AFC_FN afc_args k_as_rows(const afc_args &args) {
  afc_args rows = args;
  rows.Hq = args.Hk;
  rows.M = args.N;
  return rows;
}

KTurnedShares k_turned_shares(const afc_args &args) {
  return afc::share_out(k_as_rows(args), K_TURNED_GRADIENTS, afc::ceil_div(args.N, QUERY_TILE));
}

// What one task adds: row after row, the steps of k forward on the raw row, then back on the gradient.
AFC_FN void k_turned_task(const afc_args &call, const Workspace &w, const KTurnedShares &shares, int64_t task) {
  double *copies = w.k_turned_copies + task * shares.copy_size;
  std::memset(copies, 0, size_t(shares.copy_size) * sizeof(double));
  afc::CapturedSum<Real> gradients[K_TURNED];
  for (int k = 0; k < K_TURNED; ++k) {
    const afc_captured &gradient = call.grad_captured[K_TURNED_GRADIENTS[k].slot];
    gradients[k] = {shares.copied[k] ? copies + shares.start[k] : nullptr, static_cast<Real *>(gradient.data)};
  }
  afc::visit_tiles(k_as_rows(call), shares, task, afc::ceil_div(call.N, QUERY_TILE), [&](int64_t b64, int64_t h64, int64_t tile) {
    afc_args own;
    const afc_args &args = afc::args_of_batch(call, b64, own);
    const int b = int(b64), h = int(h64);
    const int64_t first = tile * QUERY_TILE, last = afc::min(first + QUERY_TILE, afc::key_count(args, b));
    for (int64_t r64 = first; r64 < last; ++r64) {
      const int r = int(r64), position = int(r + args.k_origin);
      const Real *table = k_table_row(args, w, b, h, r);
      Real row[HEAD_QK];
      std::memcpy(row, w.k_turned + ((b64 * args.Hk + h64) * args.N + r64) * HEAD_QK, sizeof row);
      if (afc::is_zero(row, HEAD_QK)) continue;  // nothing arrives at a row that is masked, whatever it holds
      Real before[1][HEAD_QK];  // the row ahead of each step
      afc::load_row(before[0], afc::matrix<const Element>(w.k_raw, b, h).row(r), HEAD_QK);
      for (int pair = 0; pair < 32; ++pair) {
        const Real x0 = before[0][0 + 2 * pair], x1 = before[0][0 + 2 * pair + 1];
        const Real d0 = row[0 + 2 * pair], d1 = row[0 + 2 * pair + 1];
        if (d0 == Real(0) && d1 == Real(0)) continue;
        gradients[0].add(rotate_k_offset_0_0(args, b, h, r, position, pair), rotate_k_gradient_0_0(args, b, h, r, position, pair, x0, x1, d0, d1));
        gradients[1].add(rotate_k_offset_0_1(args, b, h, r, position, pair), rotate_k_gradient_0_1(args, b, h, r, position, pair, x0, x1, d0, d1));
      }
    }
  });
}

