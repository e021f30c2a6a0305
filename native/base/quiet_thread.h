// Threads that stay out of the program's way.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace hetero {

// The system lets this process have no more threads.
struct NoMoreThreads : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A named thread with all signals blocked, which are for the threads that run Python; except those
// that tell of a fault of the thread itself: blocked, they would end the process without a word.
// Throws NoMoreThreads.
template <typename Body>
std::thread quiet_thread(const char* name, Body body) {
  sigset_t blocked, before;
  sigfillset(&blocked);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) {
    sigdelset(&blocked, fault);
  }
  // Set before the start, because the new thread inherits the mask.
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  std::thread thread;
  try {
    thread = std::thread(std::move(body));
  } catch (const std::system_error&) {  // pthread_create() knows no other reason than EAGAIN here
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw NoMoreThreads(std::string("cannot start the thread ") + name +
                        ": the limit of processes (ulimit -u, pids.max) is reached");
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace hetero
