// prefill_attend() against attention in float64.
#include <cmath>

#include "tests/libruntime/cuda/prefill_device.h"

namespace sqz::cuda::test {
namespace {

struct Case {
  DType dtype = DType::kBF16;
  int dim = 128, kv_heads = 2, group = 4;
  int tokens = 70, block = 32;
  int slots = 1000, exact = 20;
  float query_scale = 1;
  bool dense = false;  // no lists: everything
  std::vector<int2> table = {};
  int faulty_list = -1;  // if masked: for its first token
  bool masked = false;   // a token attends to a quarter of its list's keys, the third one to none
};

class Problem {
 public:
  // Runs of list l by runs_of(l).
  template <class RunsOf>
  Problem(const Case& c, uint64_t seed, const RunsOf& runs_of)
      : c_(c),
        random_(seed),
        queries_(c.dtype, int64_t{c.tokens} * heads() * c.dim, c.query_scale, random_),
        keys_(c.dtype, int64_t{c.kv_heads} * c.slots * c.dim, 1, random_),
        values_(c.dtype, int64_t{c.kv_heads} * c.slots * c.dim, 1, random_),
        exact_keys_(c.dtype, int64_t{c.kv_heads} * c.exact * c.dim, 1, random_),
        exact_values_(c.dtype, int64_t{c.kv_heads} * c.exact * c.dim, 1, random_) {
    blocks_ = c.table;
    for (int first = 0; c.table.empty() && first < c.tokens; first += c.block) {
      blocks_.push_back({first, std::min(c.block, c.tokens - first)});
    }
    for (size_t l = 0; l < blocks_.size() * c.kv_heads; ++l) runs_.push_back(runs_of(l, random_));
    if (c.masked) draw_masks();
  }

  PrefillShape shape() const {
    return {c_.dtype, c_.dim, c_.kv_heads, c_.group, 1 / std::sqrt(static_cast<float>(c_.dim))};
  }

  void run_and_check() {
    size_t most = 1;
    for (const auto& list : runs_) most = std::max(most, list.size());
    std::vector<uint32_t> faults(runs_.size(), 0);
    if (c_.faulty_list >= 0) faults[static_cast<size_t>(c_.faulty_list)] = 1;
    DeviceRuns lists(runs_, static_cast<int64_t>(most), faults);
    DeviceArray<int2> table(blocks_);
    const int64_t rows = int64_t{c_.tokens} * heads();
    DeviceArray<uint16_t> out(rows * c_.dim);
    DeviceArray<float> lse(rows);
    PrefillAttend call;
    call.shape = shape();
    call.blocks = {c_.tokens, static_cast<int32_t>(blocks_.size()), c_.block,
                   c_.table.empty() ? nullptr : table.get()};
    call.keys = {c_.slots,
                 c_.exact,
                 0,
                 keys_.device->get(),
                 values_.device->get(),
                 exact_keys_.device->get(),
                 exact_values_.device->get()};
    if (!c_.dense) call.selected = lists.lists;
    std::unique_ptr<DeviceArray<uint32_t>> masks;
    if (c_.masked) {
      masks = std::make_unique<DeviceArray<uint32_t>>(masks_);
      call.masks = masks->get();
      call.mask_stride = mask_stride_;
    }
    call.queries = queries_.device->get();
    call.out = out.get();
    call.lse = lse.get();
    const int64_t bytes = prefill_attend_workspace(call.shape, call.blocks, multiprocessors());
    DeviceArray<uint8_t> workspace(bytes);
    const Status status = prefill_attend(call, workspace.get(), bytes, multiprocessors(), nullptr);
    ASSERT_TRUE(status.ok()) << status.message();
    check(out.host(), lse.host());
  }

 private:
  int heads() const { return c_.kv_heads * c_.group; }

  void draw_masks() {
    mask_stride_ = (c_.exact + c_.slots + kMaskSlack + 3) / 4 * 4;
    masks_.resize(runs_.size() * mask_stride_);
    for (uint32_t& word : masks_) {
      word = static_cast<uint32_t>(random_.below(int64_t{1} << 32)) &
             static_cast<uint32_t>(random_.below(int64_t{1} << 32)) & ~4u;
    }
  }
  // The rows of a list that a token of its block attends to.
  std::vector<const float*> attended(const std::vector<const float*>& rows, size_t list,
                                     int token) const {
    if (!c_.masked) return rows;
    std::vector<const float*> own;
    for (size_t i = 0; i < rows.size(); ++i) {
      if ((masks_[list * mask_stride_ + i] >> token & 1) != 0) own.push_back(rows[i]);
    }
    return own;
  }

  std::vector<const float*> rows_of(int kv_head, const std::vector<SlotRun>& runs,
                                    bool values) const {
    std::vector<const float*> rows;
    const auto& exact = values ? exact_values_.values : exact_keys_.values;
    const auto& slots = values ? values_.values : keys_.values;
    for (int i = 0; i < c_.exact; ++i) {
      rows.push_back(&exact[(int64_t{kv_head} * c_.exact + i) * c_.dim]);
    }
    const auto add = [&](uint32_t first, uint32_t length) {
      for (uint32_t i = first; i < first + length; ++i) {
        rows.push_back(&slots[(int64_t{kv_head} * c_.slots + i) * c_.dim]);
      }
    };
    if (c_.dense) {
      add(0, c_.slots);
    } else {
      for (const SlotRun& run : runs) add(run.first, run.length);
    }
    return rows;
  }

  void check(const std::vector<uint16_t>& out, const std::vector<float>& lse) const {
    double error = 0, norm = 0, lse_error = 0;
    for (size_t block = 0; block < blocks_.size(); ++block) {
      for (int h = 0; h < c_.kv_heads; ++h) {
        const auto& runs = runs_[block * c_.kv_heads + h];
        const auto all_keys = rows_of(h, runs, false), all_values = rows_of(h, runs, true);
        for (int token = blocks_[block].x; token < blocks_[block].x + blocks_[block].y; ++token) {
          const size_t list = block * c_.kv_heads + h;
          const auto keys = attended(all_keys, list, token - blocks_[block].x);
          const auto values = attended(all_values, list, token - blocks_[block].x);
          for (int g = 0; g < c_.group; ++g) {
            const int64_t row = int64_t{token} * heads() + h * c_.group + g;
            if (static_cast<int>(list) == c_.faulty_list &&
                (!c_.masked || token == blocks_[block].x)) {
              ASSERT_TRUE(std::isnan(lse[row])) << "row " << row;
              continue;
            }
            check_row(row, keys, values, &out[row * c_.dim], lse[row], error, norm, lse_error);
          }
        }
      }
    }
    const double relative = norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
    std::printf("[          ] relative error %.2e, lse %.1e\n", relative, lse_error);
    EXPECT_LT(relative, c_.dtype == DType::kBF16 ? 2.5e-3 : 5e-4);
    EXPECT_LT(lse_error, 1e-3);
  }

  void check_row(int64_t row, const std::vector<const float*>& keys,
                 const std::vector<const float*>& values, const uint16_t* out, float lse,
                 double& error, double& norm, double& lse_error) const {
    LayerView view;
    view.dtype = DType::kF32;
    view.head_dim = c_.dim;
    reference::Attention attention(&queries_.values[row * c_.dim], view, 1 / std::sqrt(c_.dim));
    for (size_t i = 0; i < keys.size(); ++i) attention.add(keys[i], values[i], 0);
    const reference::State expected = attention.state();
    if (keys.empty()) {
      ASSERT_EQ(lse, -INFINITY) << "row " << row;
    } else {
      lse_error = std::max(lse_error, std::abs(lse - expected.lse));
      ASSERT_FALSE(std::isnan(lse)) << "row " << row;
    }
    for (int c = 0; c < c_.dim; ++c) {
      const double got =
          c_.dtype == DType::kBF16 ? to_float(BFloat16{out[c]}) : to_float(Float16{out[c]});
      ASSERT_FALSE(std::isnan(got)) << "row " << row << " column " << c;
      const double want = expected.out[c];
      error += (got - want) * (got - want);
      norm += want * want;
    }
  }

  Case c_;
  testing::Random random_;
  Tensor queries_, keys_, values_, exact_keys_, exact_values_;
  std::vector<int2> blocks_;
  std::vector<std::vector<SlotRun>> runs_;
  std::vector<uint32_t> masks_;  // [lists, mask_stride_]
  size_t mask_stride_ = 0;
};

// Random runs of 1 to `longest` keys that hold about 1 / `one_in` of the slots.
auto random_runs(int slots, int longest, int one_in) {
  return [=](size_t, testing::Random& random) {
    std::vector<SlotRun> runs;
    for (int64_t at = random.below(2 * longest);;) {
      const int64_t length = 1 + random.below(longest);
      if (at + length > slots) return runs;
      runs.push_back({static_cast<uint32_t>(at), static_cast<uint32_t>(length)});
      at += length + 1 + random.below((one_in - 1) * longest);
    }
  };
}

std::vector<SlotRun> no_runs(size_t, testing::Random&) {
  return {};
}

template <class RunsOf>
void check(const Case& c, uint64_t seed, const RunsOf& runs_of) {
  Problem(c, seed, runs_of).run_and_check();
}
// Runs of up to 40 keys.
void check(const Case& c, uint64_t seed, int one_in = 4) {
  check(c, seed, random_runs(c.slots, 40, one_in));
}

class PrefillAttendTest : public OnHopper {};

TEST_F(PrefillAttendTest, DimensionsTypesAndGroups) {
  uint64_t seed = 1;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int dim : {64, 96, 128, 256}) {
      for (const int group : {1, 4, 7, 16}) {
        if (dtype == DType::kF16 && group != 4) continue;
        SCOPED_TRACE(concat("d ", dim, " group ", group, " ", dtype_name(dtype)));
        check({.dtype = dtype, .dim = dim, .group = group}, seed++);
      }
    }
  }
}

TEST_F(PrefillAttendTest, Dense) {
  for (const int exact : {20, 0}) {
    check({.tokens = 130, .block = 128, .slots = 3001, .exact = exact, .dense = true}, 100,
          no_runs);
  }
}

TEST_F(PrefillAttendTest, NothingSelectedAndNothingAtAll) {
  check({}, 110, no_runs);
  check({.exact = 0}, 111, no_runs);
  check({.slots = 0, .exact = 5}, 113, no_runs);
  // Some lists are empty, some are not.
  const auto some = random_runs(1000, 40, 4);
  check({.exact = 0}, 112, [&](size_t l, testing::Random& random) {
    return l % 2 == 0 ? some(l, random) : std::vector<SlotRun>();
  });
}

TEST_F(PrefillAttendTest, RunsOfOneKeyAndRunsOfMany) {
  check({.slots = 4000}, 120, random_runs(4000, 1, 3));
  check({.slots = 4000}, 121, random_runs(4000, 700, 2));
  check({.slots = 4000}, 122, [](size_t l, testing::Random&) {
    return std::vector<SlotRun>{{static_cast<uint32_t>(l), 176}};
  });
}

// One head with far more keys than the others: its lists are split and merged.
TEST_F(PrefillAttendTest, Skew) {
  const auto many = random_runs(20000, 60, 2), few = random_runs(20000, 3, 100);
  for (const int dim : {64, 128, 256}) {
    SCOPED_TRACE(dim);
    check({.dim = dim, .kv_heads = 4, .tokens = 40, .block = 40, .slots = 20000}, 130,
          [&](size_t l, testing::Random& random) {
            return l % 4 == 1 ? many(l, random) : few(l, random);
          });
  }
}

// Logits of some hundreds: maxima move, and most weights underflow.
TEST_F(PrefillAttendTest, LargeLogits) {
  check({.query_scale = 40}, 140, 3);
}

// Each token has keys of its own in the lists of its block. With logits of some hundreds most keys
// that a row does not attend to are far above those that it does.
TEST_F(PrefillAttendTest, Masks) {
  uint64_t seed = 160;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int dim : {64, 96, 128, 256}) {
      for (const auto& [group, block] : {std::pair(4, 32), {4, 16}, {1, 32}, {2, 32}, {7, 9}}) {
        if (dtype == DType::kF16 && group != 4) continue;
        SCOPED_TRACE(concat("d ", dim, " group ", group, " block ", block, " ", dtype_name(dtype)));
        check({.dtype = dtype,
               .dim = dim,
               .group = group,
               .block = block,
               .exact = block == 16 ? 0 : 20,
               .query_scale = group == 7 ? 40.0f : 1.0f,
               .faulty_list = 1,
               .masked = true},
              seed++);
      }
    }
  }
}

TEST_F(PrefillAttendTest, FaultsShow) {
  check({.faulty_list = 1}, 145, 3);
  check({.dim = 64, .tokens = 32, .slots = 20000, .faulty_list = 1}, 146, 3);  // split and merged
}

TEST_F(PrefillAttendTest, BlocksOfATable) {
  check({.tokens = 100, .block = 48, .table = {{0, 3}, {3, 48}, {51, 1}, {52, 48}}}, 150);
}

TEST(PrefillAttendArguments, SmallWorkspaceAndShapesAreRefused) {
  PrefillAttend call;
  call.shape = {DType::kBF16, 128, 2, 4, 0.1f};
  call.blocks = {64, 2, 32, nullptr};
  const int64_t bytes = prefill_attend_workspace(call.shape, call.blocks, 132);
  EXPECT_EQ(prefill_attend(call, nullptr, bytes - 1, 132, nullptr).code(), Code::kInvalidArgument);
  call.shape.dim = 80;
  const Status status = prefill_attend(call, nullptr, bytes, 132, nullptr);
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_NE(status.message().find("80"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace sqz::cuda::test
