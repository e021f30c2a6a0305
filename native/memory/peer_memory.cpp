#include "memory/peer_memory.h"

#include <sys/prctl.h>
#include <sys/uio.h>

#include <cerrno>
#include <string>
#include <system_error>

namespace hetero {

void permit_peers_to_read([[maybe_unused]] bool permit) {
#ifdef PR_SET_PTRACER
  prctl(PR_SET_PTRACER, permit ? PR_SET_PTRACER_ANY : 0, 0, 0, 0);
#endif
}

void read_peer_memory(pid_t process, std::uintptr_t from, std::byte* into, std::size_t nbytes) {
  // One call copies 2 GiB at most, and fewer than it was asked for if a page is missing.
  while (nbytes > 0) {
    const iovec local{into, nbytes};
    const iovec remote{reinterpret_cast<void*>(from), nbytes};
    const ssize_t copied = process_vm_readv(process, &local, 1, &remote, 1, 0);
    if (copied < 0) {
      throw std::system_error(
          errno, std::generic_category(),
          "cannot read " + std::to_string(nbytes) + " bytes of process " + std::to_string(process));
    }
    if (copied == 0) {
      throw std::system_error(EFAULT, std::generic_category(),
                              "process " + std::to_string(process) + " has no memory there");
    }
    into += copied;
    from += static_cast<std::uintptr_t>(copied);
    nbytes -= static_cast<std::size_t>(copied);
  }
}

}  // namespace hetero
