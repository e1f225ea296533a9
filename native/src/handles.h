// The public handles, for the files that implement public calls.
#pragma once

#include <memory>

#include "engine.h"
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
struct tinyloop::PrefixPool {
  tinyloop::Pool pool;
};
struct tinyloop::ResumeHandle {
  std::shared_ptr<tinyloop::ResumeState> state;
};
