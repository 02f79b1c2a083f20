// A small team of threads for kernels: whoever is free claims the next item.
//
// One pool per process, made on first use and never destroyed: its threads touch no Python, hold no
// lock while they wait, and die with the process. The caller works too and waits only for items
// that a worker has begun, so a missing, late or forked-away worker costs speed, not progress.
// Which thread runs an item decides no bit of its result.
#pragma once

#include <stdint.h>

namespace streamkv {

// Threads that work on one call, the caller included. 1 until set.
int num_threads();
void set_num_threads(int count);

// Scratch of the calling thread: kScratchFloats, 64-byte aligned, kept until the thread ends.
float* thread_scratch();

// Runs item(context, i) for each i in [0, num_items). Items run at once, in any order, in threads
// of the pool; all in the caller's if `parallel` is false or another call holds the pool.
void run_items(int64_t num_items, bool parallel, void (*item)(void* context, int64_t i),
               void* context);

template <class Item>
void parallel_for(int64_t num_items, bool parallel, Item&& item) {
  run_items(
      num_items, parallel, [](void* context, int64_t i) { (*static_cast<Item*>(context))(i); },
      &item);
}

}  // namespace streamkv
