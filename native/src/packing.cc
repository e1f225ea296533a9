#include "packing.h"

#include <algorithm>
#include <numeric>
#include <set>

namespace tinyloop {

namespace {

std::vector<size_t> prefix_order(const std::vector<PassNeeds>& needs) {
  std::map<const PrefixState*, size_t> rank;
  for (const PassNeeds& item : needs) rank.emplace(item.prefix, rank.size());
  std::vector<size_t> order(needs.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return rank.at(needs[a].prefix) < rank.at(needs[b].prefix);
  });
  return order;
}

// The end of the pass that begins at order[first].
size_t pass_end(const Engine& engine, const std::vector<PassNeeds>& needs,
                const std::vector<size_t>& order, size_t first) {
  const int64_t budget = engine.options.max_seq_len;
  const bool hidden = stores_hidden(engine.cache.mode);
  std::set<const PrefixState*> seen;
  int64_t rows = 0, hot = 0;
  size_t end = first;
  for (; end < order.size(); ++end) {
    const PassNeeds& next = needs[order[end]];
    const bool is_new = hidden && next.prefix != nullptr && seen.insert(next.prefix).second;
    const int64_t more_hot = is_new ? next.prefix->length() : 0;
    const bool fits = rows + next.rows <= budget &&
                      (more_hot == 0 || hot + more_hot <= engine.buffers.rebuild_rows);
    if (end > first && !fits) break;
    rows += next.rows;
    hot += more_hot;
  }
  return end;
}

}  // namespace

Packed pack(const Engine& engine, const std::vector<PassNeeds>& needs) {
  Packed packed;
  for (const PassNeeds& item : needs) {
    if (item.prefix == nullptr || packed.views.count(item.prefix) != 0) continue;
    packed.views.emplace(item.prefix, item.prefix->view());
  }
  const std::vector<size_t> order = prefix_order(needs);
  for (size_t first = 0; first < order.size();) {
    const size_t end = pass_end(engine, needs, order, first);
    packed.passes.emplace_back(order.begin() + static_cast<std::ptrdiff_t>(first),
                               order.begin() + static_cast<std::ptrdiff_t>(end));
    first = end;
  }
  return packed;
}

}  // namespace tinyloop
