// Preloaded into a process, counts its live blocks of 64-byte alignment. Those are the engine's, so
// this is a sum of what it holds that owes nothing to the engine's own books.
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

extern void* __libc_memalign(size_t alignment, size_t bytes);
extern void __libc_free(void* data);

enum { kSlots = 1 << 16 };  // far more than live blocks
static void* blocks[kSlots];
static size_t sizes[kSlots];
static size_t live_bytes, allocations;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

// The slot of a block, or the first empty one on its way. A freed slot keeps a mark, not a hole.
static void* const kFreed = (void*)1;
static size_t slot_of(const void* data) {
  size_t slot = ((uintptr_t)data >> 6) * 0x9E3779B97F4A7C15u >> 48;
  while (blocks[slot] != data && blocks[slot] != NULL) slot = (slot + 1) % kSlots;
  return slot;
}

size_t counted_live_bytes(void) { return live_bytes; }
size_t counted_allocations(void) { return allocations; }

void* aligned_alloc(size_t alignment, size_t bytes) {
  void* data = __libc_memalign(alignment, bytes);
  if (data == NULL || alignment != 64) return data;
  pthread_mutex_lock(&mutex);
  const size_t slot = slot_of(data);
  blocks[slot] = data;
  sizes[slot] = bytes;
  live_bytes += bytes;
  ++allocations;
  pthread_mutex_unlock(&mutex);
  return data;
}

void free(void* data) {
  if (data != NULL && ((uintptr_t)data & 63) == 0) {
    pthread_mutex_lock(&mutex);
    const size_t slot = slot_of(data);
    if (blocks[slot] == data) {
      blocks[slot] = kFreed;
      live_bytes -= sizes[slot];
    }
    pthread_mutex_unlock(&mutex);
  }
  __libc_free(data);
}
