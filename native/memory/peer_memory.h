// Memory of other processes of this machine, which Linux copies from one process to another.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace hetero {

// Lets processes of the same user read this one's memory, or not any more, where the Yama module
// allows only a process's ancestors to do so (ptrace_scope 1, the default of several
// distributions). Elsewhere, and where nobody may, nothing changes.
void permit_peers_to_read(bool permit);

// Copies `nbytes` at the address `from` of the process `process` to `into`. Throws
// std::system_error if the process is gone, may not be read, or has no memory there.
void read_peer_memory(pid_t process, std::uintptr_t from, std::byte* into, std::size_t nbytes);

}  // namespace hetero
