#include "sequence_memory.h"

#include <algorithm>
#include <utility>

#include "rebuild.h"

namespace tinyloop {

namespace {

// Tokens by which a sequence's memory grows.
constexpr int64_t kBlockTokens = 256;

}  // namespace

SequenceMemory::SequenceMemory(Engine& engine) : engine_(engine), hot_(engine.cache) {
  if (stores_hidden(hot_.mode)) hot_.mode = CacheMode::kFp16;
}

const CacheView* SequenceMemory::prefix_view(const GenerateItem& item) {
  if (item.prefix == nullptr) return nullptr;
  const auto [at, is_new] = views_.try_emplace(item.prefix.get());
  if (is_new) {
    try {
      at->second.view = item.prefix->view();
      if (!at->second.view.hidden.empty()) make_hot(*item.prefix, at->second);
    } catch (...) {
      views_.erase(at);
      throw;
    }
  }
  return &at->second.view;
}

void SequenceMemory::make_hot(const PrefixState& prefix, PrefixView& view) {
  const int64_t planes = engine_.schedule.planes(prefix.depth);
  view.hot = make_cache_block(*engine_.account, hot_, {0, prefix.length(), 0, planes},
                              Owner::kRequest, "rebuilt keys and values of a prefix");
  rebuild_all(engine_, view.view, prefix.depth, view.hot->places.kv);
  view.view.hidden.clear();
  view.view.kv = {view.hot->places.kv};
}

void SequenceMemory::grow(Sequence& s, int64_t end) {
  if (end <= s.block_end) return;
  const GenerateItem& item = s.job->item;
  const int64_t begin = s.blocks.empty() ? s.start : s.block_end;
  const int64_t last = s.start + static_cast<int64_t>(item.n_ids) + item.max_new_tokens - 1;
  // What exits early cannot be computed again to the same numbers, so it gets all at once.
  const int64_t wanted = exits(item) ? last : std::min(last, end + kBlockTokens);
  const int64_t planes = engine_.schedule.planes(item.depth);
  auto block = make_cache_block(*engine_.account, hot_, {begin, std::max(end, wanted), 0, planes},
                                Owner::kRequest, "keys and values of a sequence");
  if (s.blocks.empty()) {
    if (s.prefix != nullptr) s.before = *s.prefix;
  } else {
    s.before.append(s.blocks.back()->places);
    s.before.length = s.block_end;
  }
  s.blocks.push_back(std::move(block));
  s.block_end = std::max(end, wanted);
}

bool SequenceMemory::drop_views(
    const std::function<bool(const PrefixState*, const CacheView&)>& is_idle) {
  return std::erase_if(views_, [&](const auto& entry) {
           return is_idle(entry.first, entry.second.view);
         }) > 0;
}

}  // namespace tinyloop
