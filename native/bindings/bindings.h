// What each file of the binding adds to the module.
#pragma once

#include <pybind11/pybind11.h>

void bind_handles(pybind11::module_& m);     // PrefixCache, ResumeHandle
void bind_scoring(pybind11::module_& m);     // ScoreResult
void bind_generation(pybind11::module_& m);  // GenerateRequest, Completion
void bind_model(pybind11::module_& m);       // Model, load_model, plan
