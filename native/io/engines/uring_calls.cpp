// All calls of liburing that the io_uring driver makes. CMake compiles and links them before it
// builds the driver: liburing before 2.2 lacks some, and then the driver is left out.
#include <liburing.h>

// NOLINTNEXTLINE(misc-use-internal-linkage): an unused function in here would be left out
void call_all(io_uring& ring, const iovec& memory) {
  io_uring_queue_init(1, &ring, 0);
  io_uring_ring_dontfork(&ring);
  io_uring_register_buffers_sparse(&ring, 1);
  io_uring_register_buffers_update_tag(&ring, 0, &memory, nullptr, 1);
  io_uring_sqe* const entry = io_uring_get_sqe(&ring);
  io_uring_prep_read(entry, 0, memory.iov_base, 1, 0);
  io_uring_prep_write(entry, 0, memory.iov_base, 1, 0);
  io_uring_prep_read_fixed(entry, 0, memory.iov_base, 1, 0, 0);
  io_uring_prep_write_fixed(entry, 0, memory.iov_base, 1, 0, 0);
  io_uring_sqe_set_data64(entry, 0);
  io_uring_submit_and_wait(&ring, 1);
  io_uring_cqe* completion = nullptr;
  io_uring_wait_cqe(&ring, &completion);
  unsigned head = 0, seen = 0;
  io_uring_for_each_cqe(&ring, head, completion) { ++seen; }
  io_uring_cq_advance(&ring, seen);
  io_uring_unregister_buffers(&ring);
  io_uring_queue_exit(&ring);
}
