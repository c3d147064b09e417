// Turns a completion into a return value. Must not be called on the engine's thread.
#pragma once

#include <functional>
#include <future>
#include <utility>

#include "base/status.h"

namespace dcp {

template <class T, class F>
Result<T> Await(F&& start) {
  std::promise<Result<T>> promise;
  std::future<Result<T>> future = promise.get_future();
  std::forward<F>(start)(
      std::function<void(Result<T>)>([&promise](Result<T> r) { promise.set_value(std::move(r)); }));
  return future.get();
}

}  // namespace dcp
