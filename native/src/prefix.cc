#include "prefix.h"

#include <algorithm>
#include <set>
#include <utility>

#include "checks.h"
#include "pass.h"

namespace tinyloop {

PrefixState::~PrefixState() {
  // A long chain goes link by link: each link's own destructor would go as deep as the chain is
  // long.
  std::shared_ptr<PrefixState> next = std::move(parent);
  while (next && next.use_count() == 1) next = std::exchange(next->parent, nullptr);
}

size_t PrefixState::bytes() const {
  size_t total = states ? states->bytes() : 0;
  std::set<const CacheBlock*> blocks;
  for (const PlaneRange& range : planes) {
    if (blocks.insert(range.block.get()).second) total += range.block->memory.bytes();
  }
  return total;
}

void PrefixState::require_open(const std::string& what) const {
  if (engine->closed()) throw ClosedHandleError("cannot use " + what + ": its model was closed");
  engine->require_usable();
}

CacheView PrefixState::view() const {
  std::vector<const PrefixState*> chain;
  for (const PrefixState* state = this; state != nullptr; state = state->parent.get()) {
    chain.push_back(state);
  }
  CacheView view;
  view.length = end;
  for (auto state = chain.rbegin(); state != chain.rend(); ++state) {
    for (const PlaneRange& range : (*state)->planes) {
      view.append(clip_planes(range.block->places, range.first, range.last));
    }
  }
  return view;
}

std::vector<int32_t> PrefixState::all_ids() const {
  std::vector<int32_t> all = parent ? parent->all_ids() : std::vector<int32_t>();
  all.insert(all.end(), ids.begin(), ids.end());
  return all;
}

std::shared_ptr<Block> allocate_states(const Engine& engine, int64_t tokens, Owner owner) {
  const int64_t values = engine.schedule.states * tokens * engine.descriptor.hidden_size;
  return std::make_shared<Block>(engine.account->allocate(
      static_cast<size_t>(values) * sizeof(float), owner, "states to go on from"));
}

KeepPlaces keep_places(const PrefixState& state) {
  const Schedule& schedule = state.engine->schedule;
  KeepPlaces keep;
  for (const PlaneRange& range : state.planes) {
    const CachePlaces places = clip_planes(range.block->places, range.first, range.last);
    // Planes that run once are kept by the range that holds the last of them: the coda's.
    if (range.first < schedule.fixed_planes) keep.once = places;
    if (range.last > schedule.fixed_planes) keep.loops = places;
    keep.any = true;
  }
  return keep;
}

void check_prefill(const Engine& engine, const int32_t* ids, size_t n_ids, int depth,
                   const PrefixState* parent) {
  check_depth(depth, "the prefix");
  if (n_ids == 0) throw InvalidInputError("cannot build a prefix of 0 tokens");
  check_ids(engine, ids, n_ids, "the prefix");
  if (parent != nullptr) {
    check_prefix(engine, *parent, depth, "the prefix");
    if (parent->depth != depth) {
      throw MismatchError("cannot extend a prefix of depth " + std::to_string(parent->depth) +
                          " at depth " + std::to_string(depth));
    }
    if (engine.descriptor.prefix_lm) {
      throw MismatchError(
          "cannot extend a prefix of a prefix-LM model: a prompt is attended as a whole, so build "
          "one prefix of the whole prompt");
    }
  }
  check_rows(engine, n_ids, parent != nullptr ? parent->length() : 0, "the prefix");
}

std::shared_ptr<PrefixState> prefill(const std::shared_ptr<Engine>& engine, const int32_t* ids,
                                     size_t n_ids, int depth, std::shared_ptr<PrefixState> parent,
                                     bool upgradable) {
  const ForwardGuard guard(*engine);
  return prefill_guarded(engine, ids, n_ids, depth, std::move(parent), upgradable);
}

std::shared_ptr<PrefixState> prefill_guarded(const std::shared_ptr<Engine>& engine,
                                             const int32_t* ids, size_t n_ids, int depth,
                                             std::shared_ptr<PrefixState> parent, bool upgradable) {
  check_prefill(*engine, ids, n_ids, depth, parent.get());
  auto state = std::make_shared<PrefixState>();
  state->begin = parent ? parent->length() : 0;
  state->end = state->begin + static_cast<int64_t>(n_ids);
  state->engine = engine;
  state->depth = depth;
  state->open_end = engine->descriptor.prefix_lm ? state->end : 0;
  state->ids.assign(ids, ids + n_ids);
  const int64_t planes = engine->schedule.planes(depth);
  auto block =
      make_cache_block(*engine->account, engine->cache, {state->begin, state->end, 0, planes},
                       Owner::kPrefix, "the prefix");
  state->planes.push_back({std::move(block), 0, planes});
  if (upgradable) state->states = allocate_states(*engine, state->own_length(), Owner::kPrefix);

  const CacheView before = parent ? parent->view() : CacheView();
  const KeepPlaces keep = keep_places(*state);
  PassSequence sequence;
  sequence.ids = ids;
  sequence.rows = state->own_length();
  sequence.position = state->begin;
  sequence.open_end = state->open_end;
  sequence.before = parent ? &before : nullptr;
  sequence.keep_once = &keep.once;
  sequence.keep_loops = &keep.loops;
  Pass pass(*engine, {sequence});
  while (pass.loops() < depth) pass.run_loop();
  if (state->states) pass.save(0, state->states->as<float>());
  if (engine->schedule.has_coda()) pass.finish();
  state->parent = std::move(parent);
  return state;
}

namespace {

void check_same_tokens(const Upgrade& upgrade, const PrefixState& from) {
  const auto ids = [](const std::shared_ptr<PrefixState>& prefix) {
    return prefix ? prefix->all_ids() : std::vector<int32_t>();
  };
  if (ids(upgrade.parent) != ids(from.parent)) {
    throw MismatchError("cannot upgrade " + upgrade.what +
                        " on another prefix: its token ids are not those that it stands on");
  }
}

}  // namespace

std::shared_ptr<PrefixState> prepare_upgrade(const Upgrade& upgrade, int depth) {
  const PrefixState& from = *upgrade.from;
  Engine& engine = *from.engine;
  const Schedule& schedule = engine.schedule;
  check_depth(depth, upgrade.what);
  if (depth <= from.depth) {
    throw MismatchError("cannot upgrade " + upgrade.what + " from depth " +
                        std::to_string(from.depth) + " to " + std::to_string(depth) +
                        ": it must be greater");
  }
  if (!from.states) {
    throw MismatchError("cannot upgrade " + upgrade.what +
                        ": it kept no states; build it as upgradable");
  }
  if (upgrade.parent) check_prefix(engine, *upgrade.parent, depth, upgrade.what);
  if (upgrade.parent != from.parent) check_same_tokens(upgrade, *upgrade.from);
  auto to = std::make_shared<PrefixState>();
  to->engine = from.engine;
  to->ids = from.ids;
  to->begin = from.begin;
  to->end = from.end;
  to->depth = depth;
  to->open_end = from.open_end;
  to->states = allocate_states(engine, from.own_length(), upgrade.owner);
  if (!from.has_planes()) {
    to->parent = upgrade.parent;
    return to;
  }
  const int64_t first_coda = schedule.fixed_planes - schedule.after_layers;
  const auto add = [&](std::shared_ptr<CacheBlock> block, int64_t first, int64_t last) {
    if (first < last) to->planes.push_back({std::move(block), first, last});
  };
  const auto fresh = [&](int64_t first, int64_t last) {
    return make_cache_block(*engine.account, engine.cache, {from.begin, from.end, first, last},
                            upgrade.owner, "an upgrade's planes");
  };
  for (const PlaneRange& range : from.planes) {
    add(range.block, range.first, std::min(range.last, first_coda));
    add(range.block, std::max(range.first, schedule.fixed_planes), range.last);
  }
  if (schedule.has_coda()) {
    add(fresh(first_coda, schedule.fixed_planes), first_coda, schedule.fixed_planes);
  }
  const int64_t first = schedule.planes(from.depth), last = schedule.planes(depth);
  add(upgrade.reserve ? upgrade.reserve : fresh(first, last), first, last);
  to->parent = upgrade.parent;
  return to;
}

std::shared_ptr<PrefixState> upgrade_prefix(const std::shared_ptr<PrefixState>& prefix, int depth,
                                            std::shared_ptr<PrefixState> parent) {
  Engine& engine = *prefix->engine;
  ForwardGuard guard(engine);
  if (!parent) parent = prefix->parent;
  auto to = prepare_upgrade({prefix, parent, nullptr, Owner::kPrefix, "the prefix"}, depth);
  const CacheView before = parent ? parent->view() : CacheView();
  const KeepPlaces keep = keep_places(*to);
  PassSequence sequence;
  sequence.ids = prefix->ids.data();
  sequence.rows = prefix->own_length();
  sequence.position = prefix->begin;
  sequence.open_end = prefix->open_end;
  sequence.before = parent ? &before : nullptr;
  sequence.keep_once = &keep.once;
  sequence.keep_loops = &keep.loops;
  sequence.resume = prefix->states->as<float>();
  Pass pass(engine, {sequence}, prefix->depth);
  while (pass.loops() < depth) pass.run_loop();
  pass.save(0, to->states->as<float>());
  if (engine.schedule.has_coda()) pass.finish();
  return to;
}

}  // namespace tinyloop
