#pragma once

#include <pybind11/pybind11.h>

// Model, PrefixCache, ScoreResult and load_model.
void bind_model(pybind11::module_& m);

// Private, for tests: one draw of the sampler, and the books of a pool of prefixes.
void bind_sampling(pybind11::module_& m);
void bind_pool_ledger(pybind11::module_& m);
