// Jobs of the worker pool whose calls wait for each other at gates, so that nothing depends on how
// fast a thread is.
//
// Runs all cases; it ends with status 0, or says what does not hold.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/worker_pool.h"

namespace hetero {
namespace {

void require(bool holds, const char* fact) {
  if (holds) return;
  std::fprintf(stderr, "this does not hold: %s\n", fact);
  std::_Exit(1);
}

class Gate {
 public:
  void open() {
    open_ = true;
    open_.notify_all();
  }
  void pass() const { open_.wait(false); }

 private:
  std::atomic<bool> open_{false};
};

// A job and how it ended.
struct Posted {
  explicit Posted(std::size_t count, std::function<void(std::size_t)> body)
      : job(std::make_shared<Job>(count, std::move(body), [this](std::exception_ptr failure) {
          error = std::move(failure);
          require(++ends == 1, "a job ends once");
          ended.open();
        })) {
    WorkerPool::instance().post(job);
  }

  std::string what() const {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const std::runtime_error& caught) {
      return caught.what();
    }
    return "";
  }

  std::exception_ptr error;
  std::atomic<int> ends{0};
  Gate ended;
  std::shared_ptr<Job> job;  // last: it may end before the constructor does
};

void a_job_does_not_wait_for_the_one_before() {
  WorkerPool::instance().set_threads(3);
  Gate gate;
  Posted first(1, [&](std::size_t) { gate.pass(); });
  Posted second(1, [&](std::size_t) { gate.open(); });
  first.ended.pass();
  second.ended.pass();
}

void workers_join_the_job_that_the_caller_is_at() {
  WorkerPool::instance().set_threads(4);
  for (int round = 0; round < 100; ++round) {
    std::atomic<int> inside{0};
    WorkerPool::instance().run(4, [&](std::size_t) {
      ++inside;
      inside.notify_all();
      for (int now = inside; now < 4; now = inside) inside.wait(now);
    });
  }
}

void an_error_leaves_out_what_was_not_begun_and_other_jobs_alone() {
  WorkerPool::instance().set_threads(3);
  Gate gate;
  std::atomic<int> failed_calls{0}, other_calls{0};
  Posted failing(1000, [&](std::size_t) {
    ++failed_calls;
    gate.pass();
    throw std::runtime_error("made to fail");
  });
  Posted other(1000, [&](std::size_t) { ++other_calls; });
  gate.open();
  failing.ended.pass();
  other.ended.pass();
  require(failing.what() == "made to fail", "the error of a call is its job's");
  require(failed_calls <= 2, "after an error nothing more of the job is begun");
  require(failing.job->left() == 0 && !failing.job->make_one_call(), "nothing is left of it");
  require(!other.error && other_calls == 1000, "another job is made");
}

void one_thread_computes_all_that_it_posts() {
  WorkerPool::instance().set_threads(1);
  const std::thread::id caller = std::this_thread::get_id();
  int calls = 0;
  Posted posted(5, [&](std::size_t i) {
    require(std::this_thread::get_id() == caller, "there is no other thread");
    require(static_cast<int>(i) == calls++, "indices are taken in order");
  });
  for (int left = 5; left > 0; --left) {
    require(posted.job->left() == static_cast<std::size_t>(left), "what is left is counted");
    require(posted.job->make_one_call(), "an index is left");
  }
  require(!posted.job->make_one_call() && posted.ends == 1, "the last call ends the job");
}

void a_job_without_calls_ends_at_once() {
  WorkerPool::instance().set_threads(2);
  Posted posted(0, [](std::size_t) { require(false, "there is no index"); });
  require(posted.ends == 1, "it has ended");
  WorkerPool::instance().run(0, [](std::size_t) { require(false, "there is no index"); });
}

void workers_stop_while_jobs_are_queued() {
  for (int round = 0; round < 50; ++round) {
    WorkerPool::instance().set_threads(2 + round % 3);
    std::vector<std::unique_ptr<Posted>> all;
    std::atomic<int> calls{0};
    for (int i = 0; i < 20; ++i) {
      all.push_back(std::make_unique<Posted>(7, [&](std::size_t) { ++calls; }));
      if (i == 10) WorkerPool::instance().shutdown();
    }
    for (const auto& posted : all) {
      while (posted->job->make_one_call()) {
      }
      posted->ended.pass();
    }
    require(calls == 20 * 7, "every call is made once");
  }
}

void many_threads_post_and_run() {
  WorkerPool::instance().set_threads(16);
  std::vector<std::thread> callers;
  std::atomic<int> calls{0};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        std::vector<int> seen(9);
        WorkerPool::instance().run(seen.size(), [&](std::size_t i) { ++seen[i]; });
        for (const int each : seen) require(each == 1, "run() makes every call, and returns then");
        Posted posted(3, [&](std::size_t) { ++calls; });
        while (posted.job->make_one_call()) {
        }
        posted.ended.pass();
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  require(calls == 4 * 200 * 3, "every call is made once");
}

// How often the process's threads went to sleep by themselves, but for the caller.
long sleeps_of_others() {
  long total = 0;
  const std::string own = std::to_string(gettid());
  std::FILE* const list = popen("grep -H ^voluntary /proc/$PPID/task/*/status", "r");
  char line[256];
  while (std::fgets(line, sizeof line, list) != nullptr) {
    if (std::strstr(line, ("/task/" + own + "/").c_str()) == nullptr) {
      total += std::atol(std::strrchr(line, ':') + 1);
    }
  }
  pclose(list);
  return total;
}

void no_more_workers_are_woken_than_there_are_calls_for() {
  constexpr int kRounds = 200;
  WorkerPool::instance().set_threads(16);
  WorkerPool::instance().run(1000, [](std::size_t) {});
  usleep(100'000);
  const long before = sleeps_of_others();
  for (int round = 0; round < kRounds; ++round) {
    Gate gate;  // that only a worker opens
    const std::thread::id caller = std::this_thread::get_id();
    WorkerPool::instance().run(2, [&](std::size_t) {
      if (std::this_thread::get_id() == caller) {
        gate.pass();
      } else {
        gate.open();
      }
    });
    usleep(1000);  // it sleeps again
  }
  // The one that is woken may meet a mutex that another one holds, and sleeps for that; 15 each
  // time are many more.
  require(sleeps_of_others() - before <= 4 * kRounds, "one worker is woken for one call");
}

// Jobs of any length, some of whose calls fail; one after another, so that there are threads which
// have not come to the end of the job before.
void every_index_is_called_once() {
  std::mt19937 random(0);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  for (int round = 0; round < 60; ++round) {
    WorkerPool::instance().set_threads(static_cast<unsigned>(1 + below(5)));
    for (int job = 0; job < 20; ++job) {
      const std::size_t count = below(40);
      const std::size_t failing = below(3) == 0 ? below(40) : count;
      std::vector<std::atomic<int>> calls(count);
      const auto body = [&](std::size_t i) {
        ++calls[i];
        if (i == failing) throw std::runtime_error("made to fail");
      };
      bool failed = false;
      if (below(2) == 0) {
        try {
          WorkerPool::instance().run(count, body);
        } catch (const std::runtime_error&) {
          failed = true;
        }
      } else {
        Posted posted(count, body);
        while (posted.job->make_one_call()) {
        }
        posted.ended.pass();
        require(posted.job->left() == 0, "nothing is left of a job that has ended");
        failed = !posted.what().empty();
      }
      require(failed == (failing < count), "the error of a call is its job's");
      for (const auto& each : calls) {
        require(each <= 1 && (failed || each == 1), "every call is made once");
      }
    }
  }
}

}  // namespace
}  // namespace hetero

int main() {
  hetero::a_job_does_not_wait_for_the_one_before();
  hetero::workers_join_the_job_that_the_caller_is_at();
  hetero::an_error_leaves_out_what_was_not_begun_and_other_jobs_alone();
  hetero::one_thread_computes_all_that_it_posts();
  hetero::a_job_without_calls_ends_at_once();
  hetero::workers_stop_while_jobs_are_queued();
  hetero::many_threads_post_and_run();
  hetero::no_more_workers_are_woken_than_there_are_calls_for();
  hetero::every_index_is_called_once();
}
