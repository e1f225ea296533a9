// The public handles, for the files that implement public calls.
#pragma once

#include <memory>

#include "engine.h"
#include "generate_batch.h"
#include "pool.h"
#include "prefix.h"
#include "resume.h"
#include "tinyloop/tinyloop.h"

struct tinyloop::Model {
  std::shared_ptr<tinyloop::Engine> engine;
};
struct tinyloop::PrefixCache {
  std::shared_ptr<tinyloop::PrefixState> state;
};
struct tinyloop::Generation {
  std::shared_ptr<tinyloop::Engine> engine;
  std::shared_ptr<tinyloop::GenerateBatch> batch;
};
struct tinyloop::PrefixPool {
  tinyloop::Pool pool;
};
struct tinyloop::ResumeHandle {
  std::shared_ptr<tinyloop::ResumeState> state;
};
