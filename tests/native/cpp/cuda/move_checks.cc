// Copies, permutations, and states as activations.
#include "cpu/half.h"
#include "cuda/rows.h"
#include "device_data.h"

namespace tinyloop::cuda {
namespace {

std::vector<int32_t> permutation(int64_t n) {
  std::vector<int32_t> from(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) from[static_cast<size_t>(i)] = static_cast<int32_t>(i);
  for (int64_t i = n - 1; i > 0; --i) {
    const auto j = static_cast<size_t>((noise(51, i) + 1.0) / 2.0 * static_cast<double>(i + 1));
    std::swap(from[static_cast<size_t>(i)], from[j]);
  }
  return from;
}

Bytes random_bytes(size_t n, uint64_t stream) {
  Bytes bytes(n);
  for (size_t i = 0; i < n; ++i) {
    bytes[i] = static_cast<uint8_t>(noise(stream, static_cast<int64_t>(i)) * 128.0);
  }
  return bytes;
}

void check_bytes(const Bench& bench) {
  All permuted, copied, zeroed;
  for (const int64_t row_bytes : {1, 4, 7, 12, 256, 300, 1030, 8192, 20000}) {
    for (const int64_t rows : {1, 2, 65, 300}) {
      const std::string where = sized(rows, row_bytes);
      const auto n = static_cast<size_t>(rows * row_bytes);
      const auto from = permutation(rows);
      Bytes data = random_bytes(n, 52);
      for (const size_t offset : {0, 4, 1}) {
        const OnDevice<uint8_t> data_d(data, offset), scratch(Bytes(n), 0);
        const OnDevice<int32_t> from_d(from);
        permute(bench.stream, data_d.get(), row_bytes, rows, from_d.get(), scratch.get());
        Bytes expected = data;
        bench.half->permute(expected.data(), row_bytes, rows, from.data());
        permuted.add(same(data_d.read(), expected), where);

        const OnDevice<uint8_t> to(Bytes(n + 2, 0xCD), offset);
        copy(bench.stream, to.get() + 1, data_d.get(), n);
        Bytes shifted(n + 2, 0xCD);
        std::copy(expected.begin(), expected.end(), shifted.begin() + 1);
        copied.add(same(to.read(), shifted), where);
        copy(bench.stream, to.get(), data_d.get(), n);
        std::copy(expected.begin(), expected.end(), shifted.begin());
        shifted[n] = expected[n - 1];
        copied.add(same(to.read(), shifted), where);
        fill_zero(bench.stream, to.get(), n);
        std::fill_n(shifted.begin(), n, uint8_t{0});
        zeroed.add(same(to.read(), shifted), where);
      }
    }
  }
  permuted.line("permute, bits");
  copied.line("copy, bits");
  zeroed.line("fill_zero, bits");
}

void check_states(const Bench& bench, bool fp32) {
  All gathered, joined, repeated;
  for (const int64_t rows : {1, 9, 300}) {
    for (const int64_t width : {3, 64, 577, 2048}) {
      const std::string where = sized(rows, width);
      const int64_t gap = width % 2 == 0 ? 8 : 3;
      // Not what FP16 holds: it is rounded here.
      auto state = noise_floats(53, rows * width), other = noise_floats(54, rows * width);
      for (float& x : state) x *= 1.2345678f;
      for (float& x : other) x *= 0.7654321f;
      const OnDevice<float> state_d(state), other_d(other);
      std::vector<int32_t> indices;
      for (int64_t i = 0; i < rows; ++i) indices.push_back(static_cast<int32_t>(i * 7 % rows));
      const OnDevice<int32_t> indices_d(indices);
      const auto value = [&](const std::vector<float>& from, int64_t r, int64_t c) {
        const float x = from[static_cast<size_t>(r * width + c)];
        return static_cast<double>(fp32 ? x : cpu::half_to_float(cpu::float_to_half(x)));
      };

      Matrix out(fp32, rows, width, gap), both(fp32, rows, 2 * width, gap);
      const OnDevice<uint8_t> out_d(out.bytes()), both_d(both.bytes());
      gather_rows(bench.stream, fp32, state_d.get(), indices_d.get(), rows, width, out.at(out_d));
      concat_rows(bench.stream, fp32, state_d.get(), other_d.get(), rows, width, both.at(both_d));
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < width; ++c) {
          out.set(r, c, value(state, indices[static_cast<size_t>(r)], c));
          both.set(r, c, value(state, r, c));
          both.set(r, c + width, value(other, r, c));
        }
      }
      gathered.add(same(out_d.read(), out.bytes()), where);
      joined.add(same(both_d.read(), both.bytes()), where);

      broadcast_row(bench.stream, other_d.get(), rows, width, state_d.get());
      for (int64_t r = 0; r < rows; ++r) {
        std::copy_n(other.begin(), width, state.begin() + r * width);
      }
      repeated.add(same(state_d.read(), state), where);
    }
  }
  gathered.line(mode(fp32) + "gather_rows, bits");
  joined.line(mode(fp32) + "concat_rows, bits");
  repeated.line(mode(fp32) + "broadcast_row, bits");
}

}  // namespace

void check_moves(const Bench& bench) {
  check_bytes(bench);
  for (const bool fp32 : {false, true}) check_states(bench, fp32);
}

}  // namespace tinyloop::cuda
