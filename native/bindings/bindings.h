#pragma once

#include <pybind11/pybind11.h>

// Model, PrefixCache, ScoreResult and load_model.
void bind_model(pybind11::module_& m);
