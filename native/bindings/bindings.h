// What each file of the binding adds to the module.
#pragma once

#include <pybind11/pybind11.h>

void bind_handles(pybind11::module_& m);          // PrefixCache, ResumeHandle
void bind_scoring(pybind11::module_& m);          // ScoreResult
void bind_generation(pybind11::module_& m);       // GenerateRequest, Completion
void bind_live_generation(pybind11::module_& m);  // Generation, GenerationStep
void bind_model(pybind11::module_& m);            // Model, load_model, plan
void bind_pool(pybind11::module_& m);             // PrefixPool; after Model

// Private, for tests: one draw of the sampler, and the books of a pool of prefixes.
void bind_sampling(pybind11::module_& m);
void bind_pool_ledger(pybind11::module_& m);
