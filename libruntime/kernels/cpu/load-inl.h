// Loading stored numbers as float32 vectors. Per-target include guard: see hwy's foreach_target.h.
#if defined(SQZ_CPU_LOAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SQZ_CPU_LOAD_INL_H_
#undef SQZ_CPU_LOAD_INL_H_
#else
#define SQZ_CPU_LOAD_INL_H_
#endif

#include <cstring>

#include "formats/base/dtype.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace sqz {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using VF = hn::Vec<F>;
inline constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(F()));
inline constexpr int64_t kChunk = 2 * kLanes;  // dimensions that one Pair covers

// Two vectors: kChunk consecutive numbers in packed order. GCC for Arm does not compile the
// constructors that it would make by itself for the instruction set of the vectors.
struct Pair {
  Pair() {}
  Pair(VF first, VF second) : a(first), b(second) {}

  VF a, b;
};

// Stored element types. load_pair() may permute (packed order); load_natural() does not.
struct StoredF32 {
  using Element = float;
  static constexpr bool kInterleaved = false;
};
struct StoredF16 {
  using Element = hwy::float16_t;
  static constexpr bool kInterleaved = false;
};
struct StoredI8 {
  using Element = int8_t;
  static constexpr bool kInterleaved = false;
};
// Packed order of BF16: even dimensions, then odd ones, because a shift and a mask unpack them.
struct StoredBF16 {
  using Element = hwy::bfloat16_t;
  static constexpr bool kInterleaved = HWY_TARGET != HWY_SCALAR;
};

template <class S>
HWY_INLINE VF load_natural(const typename S::Element* p) {
  const F f;
  if constexpr (sizeof(typename S::Element) == sizeof(float)) {
    return hn::LoadU(f, p);
  } else if constexpr (sizeof(typename S::Element) == 1) {
    const hn::RebindToSigned<F> i32;
    return hn::ConvertTo(f, hn::PromoteTo(i32, hn::LoadU(hn::Rebind<int8_t, F>(), p)));
  } else {
    return hn::PromoteTo(f, hn::LoadU(hn::Rebind<typename S::Element, F>(), p));
  }
}

template <class S>
HWY_INLINE Pair load_pair(const typename S::Element* p) {
#if HWY_TARGET != HWY_SCALAR  // HWY_SCALAR lacks the types
  if constexpr (S::kInterleaved) {
    const F f;
    const hn::RebindToUnsigned<F> u32;
    const hn::Repartition<uint16_t, F> u16;
    const auto bits = hn::BitCast(u32, hn::LoadU(u16, reinterpret_cast<const uint16_t*>(p)));
    return {hn::BitCast(f, hn::ShiftLeft<16>(bits)),
            hn::BitCast(f, hn::And(bits, hn::Set(u32, 0xffff0000u)))};
  }
#endif
  return {load_natural<S>(p), load_natural<S>(p + kLanes)};
}

// A whole chunk whose last `missing` numbers lie beyond the row: they read as zero, and nothing
// beyond the row is touched (it may be the end of a mapping).
template <class S>
HWY_INLINE Pair load_pair_tail(const typename S::Element* p, int64_t present) {
  HWY_ALIGN typename S::Element buffer[kChunk];
  std::memset(buffer, 0, sizeof(buffer));
  std::memcpy(buffer, p, static_cast<size_t>(present) * sizeof(buffer[0]));
  return load_pair<S>(buffer);
}

// Where dimension i of a chunk stands in packed order.
template <class S>
HWY_INLINE int64_t packed_place(int64_t i) {
  return S::kInterleaved ? (i & 1) * kLanes + i / 2 : i;
}

// f(StoredX()) for the dtype; others than the three float types and I8 do not get here.
template <class Function>
HWY_INLINE void with_stored(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kBF16:
      return function(StoredBF16());
    case DType::kF16:
      return function(StoredF16());
    case DType::kI8:
      return function(StoredI8());
    default:
      return function(StoredF32());
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace sqz
HWY_AFTER_NAMESPACE();
#endif
