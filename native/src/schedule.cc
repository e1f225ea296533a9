#include "schedule.h"

namespace tinyloop {

namespace {

using Kind = Step::Kind;

Step layer_step(int64_t layer, int64_t plane, int state = 0) {
  return {Kind::kLayer, state, 0, layer, plane};
}
Step step(Kind kind, int state = 0, int other = 0) { return {kind, state, other, 0, 0}; }

// Two stacks: state 0 is the high one's, state 1 the low one's.
Schedule two_stacks(const Descriptor& d) {
  Schedule s;
  s.states = 2;
  s.before.push_back(step(Kind::kLowInit, 1));
  int64_t plane = 0;
  const auto run = [&](int state, int other, int64_t begin, int64_t end) {
    s.loop.push_back(step(Kind::kAdd, state, other));
    for (int64_t i = begin; i < end; ++i) s.loop.push_back(layer_step(i, plane++, state));
    s.loop.push_back(step(Kind::kNorm, state));
  };
  for (int64_t cycle = 0; cycle < d.low_cycles; ++cycle) run(1, 0, 0, d.n_low);
  run(0, 1, d.n_low, d.n_layers);
  s.loop_planes = plane;
  return s;
}

}  // namespace

Schedule make_schedule(const Descriptor& d) {
  if (d.n_low > 0) return two_stacks(d);
  Schedule s;
  s.fixed_planes = d.n_prelude + d.n_coda;
  s.loop_planes = d.n_core();
  s.after_layers = d.n_coda;
  for (int64_t i = 0; i < d.n_prelude; ++i) s.before.push_back(layer_step(i, i));
  if (d.inject == Inject::kLinear) {
    s.states = 2;
    s.before.push_back(step(Kind::kCopy, 1, 0));
  }
  if (d.state_init != StateInit::kInput) s.before.push_back(step(Kind::kInit));
  if (d.inject == Inject::kLinear) s.loop.push_back(step(Kind::kAdapter, 0, 1));
  for (int64_t i = 0; i < d.n_core(); ++i) s.loop.push_back(layer_step(d.n_prelude + i, i));
  if (d.loop_norm) s.loop.push_back(step(Kind::kNorm));
  if (d.exit_norm) s.after.push_back(step(Kind::kNorm));
  for (int64_t i = 0; i < d.n_coda; ++i) {
    s.after.push_back(layer_step(d.n_prelude + d.n_core() + i, d.n_prelude + i));
  }
  // The norm before the head, unless the last loop's norm was just that.
  if (!d.loop_norm || d.n_coda > 0) s.after.push_back(step(Kind::kNorm));
  return s;
}

}  // namespace tinyloop
