// Widens the tiles of a compressed panel for the matrix unit (amx_linear.h). A chunk of a panel is a pair of tiles B, and
// sums have the order of those over packed weights.
#pragma once

#include "linear/amx_linear.h"
#include "linear/compressed.h"

namespace ostinato::linear {

static_assert(kChunkUnits == kTileSize);

class CompressedPanelTiles {
 public:
  using Weight = CompressedWeight;

  static constexpr int64_t kTileStride = kChunkBytes;
  static constexpr bool kOnceFetches = true;
  static const char* memory(const CompressedWeight& weight, int64_t panel) {
    return reinterpret_cast<const char*>(weight.panel(panel)) + sizeof(PanelHeader);
  }

  CompressedPanelTiles(const CompressedWeight& weight, int64_t panel) : panel_(weight, panel), count_(weight.chunks()) {}

  // Tiles [first, last), widened at once.
  PackedTiles many_times(int64_t first, int64_t last) {
    if (panel_.is_whole()) return {panel_.whole(), nullptr, count_};
    for (int64_t tile = first; tile < last; ++tile) panel_.widen_chunk(tile, widened_ + (tile - first) * kTileSize);
    return {widened_ - first * kTileSize, nullptr, count_};
  }

  // Widens a tile while the processor still computes the products of the one before.
  class InOrder {
   public:
    InOrder(PanelReader& panel, int64_t count, uint32_t* memory) : panel_(panel), count_(count), memory_(memory) {
      if (!panel_.is_whole()) panel_.widen_chunk(0, memory_);
    }
    OSTINATO_INLINE const uint32_t* operator()(int64_t tile) {
      if (panel_.is_whole()) return panel_.whole() + tile * kTileSize;
      if (tile + 1 < count_) panel_.widen_chunk(tile + 1, memory_ + (tile + 1) % 2 * kTileSize);
      return memory_ + tile % 2 * kTileSize;
    }

   private:
    PanelReader& panel_;
    const int64_t count_;
    uint32_t* memory_;
  };
  InOrder once() { return {panel_, count_, widened_}; }

 private:
  PanelReader panel_;
  const int64_t count_;
  alignas(64) uint32_t widened_[kPassTiles * kTileSize];
};

}  // namespace ostinato::linear
