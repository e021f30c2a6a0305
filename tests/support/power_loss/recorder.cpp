// Preloaded into a program: notes, in order, whatever it changes under a folder.
//
// record_changes(root, log) begins, and replaces what was recorded before. The log has one entry a
// change, when it was made, and two for each fsync(): when it began, and when it returned. From
// that tests.support.power_loss.replay makes what a loss of power could leave. What is not followed
// (links, mmap, writev, io_uring) must not be used by the program; sendfile() and its like fail, so
// that Python copies by itself.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>

namespace {

// As replay.py has them.
enum Kind : uint32_t {
  kWrite,       // of `inode` at `offset`: data
  kResize,      // of `inode`: `offset` is the size
  kCreate,      // a file in the folder `inode`; `other` is its inode
  kMakeFolder,  // likewise
  kRemove,      // a name in the folder `inode`
  kRename,      // a name in the folder `inode` to the name after the zero byte, in folder `other`
  kExchange,    // likewise, both ways
  kSyncBegin,   // of `inode`, a file or folder; `other` counts them
  kSyncEnd,
};

struct Entry {
  uint32_t kind;
  uint32_t nbytes;  // that follow
  uint64_t inode, other, offset;
};

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
char root[PATH_MAX];
int log_fd = -1;
uint64_t syncs = 0;

template <typename Function>
Function next(Function, const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}
#define NEXT(function) next(&function, #function)

void append(Kind kind, uint64_t inode, uint64_t other, uint64_t offset, const void* data,
            size_t nbytes) {
  const int saved = errno;
  Entry entry{kind, static_cast<uint32_t>(nbytes), inode, other, offset};
  iovec parts[2] = {{&entry, sizeof entry}, {const_cast<void*>(data), nbytes}};
  pthread_mutex_lock(&mutex);
  if (log_fd >= 0 && writev(log_fd, parts, 2) != static_cast<ssize_t>(sizeof entry + nbytes)) {
    perror("recorder");
    abort();
  }
  pthread_mutex_unlock(&mutex);
  errno = saved;
}

bool is_under_root(const char* path) {
  const size_t length = strlen(root);
  return log_fd >= 0 && length != 0 && strncmp(path, root, length) == 0 &&
         (path[length] == '/' || path[length] == 0);
}

// Whether the descriptor is of something under the root; then what it is.
bool follows(int fd, struct stat* found) {
  if (log_fd < 0) return false;
  const int saved = errno;
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  bool yes = false;
  if (length > 0) {
    path[length] = 0;
    yes = is_under_root(path) && fstat(fd, found) == 0 && found->st_nlink != 0;
  }
  errno = saved;
  return yes;
}

// The absolute path of what a call names.
void resolve(int at, const char* path, char* whole) {
  const int saved = errno;
  char base[PATH_MAX] = "";
  if (path[0] != '/') {
    if (at == AT_FDCWD) {
      if (getcwd(base, sizeof base) == nullptr) base[0] = 0;
    } else {
      char link[64];
      snprintf(link, sizeof link, "/proc/self/fd/%d", at);
      const ssize_t length = readlink(link, base, sizeof base - 1);
      base[length > 0 ? length : 0] = 0;
    }
    strncat(base, "/", sizeof base - strlen(base) - 1);
  }
  snprintf(whole, PATH_MAX, "%s%s", base, path);
  for (size_t end = strlen(whole); end > 1 && whole[end - 1] == '/'; --end) whole[end - 1] = 0;
  errno = saved;
}

// A name under the root, and the inode of its folder.
struct Name {
  Name(int at, const char* path) {
    resolve(at, path, whole);
    const char* slash = strrchr(whole, '/');
    if (slash == nullptr || !is_under_root(whole)) return;
    char folder[PATH_MAX];
    snprintf(folder, sizeof folder, "%.*s", static_cast<int>(slash - whole), whole);
    if (!is_under_root(folder)) return;
    struct stat found;
    const int saved = errno;
    followed = stat(folder, &found) == 0;
    errno = saved;
    inode = found.st_ino;
    last = slash + 1;
  }

  void changed(Kind kind, uint64_t other) const {
    if (followed) append(kind, inode, other, 0, last, strlen(last));
  }

  char whole[PATH_MAX];
  bool followed = false;
  uint64_t inode = 0;
  const char* last = "";
};

void renamed(Kind kind, const Name& from, const Name& to) {
  if (!from.followed && !to.followed) return;
  if (!from.followed || !to.followed) {
    fprintf(stderr, "recorder: %s is renamed to %s\n", from.whole, to.whole);
    abort();
  }
  char both[2 * NAME_MAX + 2];
  const int length = snprintf(both, sizeof both, "%s%c%s", from.last, 0, to.last);
  append(kind, from.inode, to.inode, 0, both, static_cast<size_t>(length));
}

template <typename Open>
int opened(int at, const char* path, int flags, Open open) {
  struct stat found;
  const Name name(at, path);
  const bool creates =
      name.followed && (flags & (O_CREAT | O_TRUNC)) != 0 && (flags & O_TMPFILE) != O_TMPFILE;
  const bool was_there = creates && stat(name.whole, &found) == 0;
  const int fd = open();
  if (fd < 0 || !creates) return fd;
  const int saved = errno;
  if (fstat(fd, &found) == 0) {
    if (!was_there) name.changed(kCreate, found.st_ino);
    if (was_there && (flags & O_TRUNC) != 0) append(kResize, found.st_ino, 0, 0, nullptr, 0);
  }
  errno = saved;
  return fd;
}

mode_t mode_of(int flags, va_list more) {
  const bool given = (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
  return given ? static_cast<mode_t>(va_arg(more, int)) : 0;
}

void written(int fd, uint64_t offset, const void* data, ssize_t nbytes) {
  struct stat found;
  if (nbytes > 0 && follows(fd, &found)) {
    append(kWrite, found.st_ino, 0, offset, data, static_cast<size_t>(nbytes));
  }
}

// As the kernel has taken them: `done` bytes of the parts, one after the other.
void parts_written(int fd, uint64_t offset, const iovec* parts, int count, ssize_t done) {
  for (int i = 0; i < count && done > 0; ++i) {
    const ssize_t nbytes = std::min(done, static_cast<ssize_t>(parts[i].iov_len));
    written(fd, offset, parts[i].iov_base, nbytes);
    offset += static_cast<uint64_t>(nbytes);
    done -= nbytes;
  }
}

void resized(int fd) {
  struct stat found;
  if (follows(fd, &found)) append(kResize, found.st_ino, 0, found.st_size, nullptr, 0);
}

template <typename Sync>
int synced(int fd, Sync sync) {
  struct stat found;
  const bool yes = follows(fd, &found);
  const uint64_t number = yes ? __atomic_fetch_add(&syncs, 1, __ATOMIC_SEQ_CST) : 0;
  if (yes) append(kSyncBegin, found.st_ino, number, 0, nullptr, 0);
  const int result = sync();
  if (yes && result == 0) append(kSyncEnd, found.st_ino, number, 0, nullptr, 0);
  return result;
}

}  // namespace

extern "C" {

int record_changes(const char* under, const char* log) {
  pthread_mutex_lock(&mutex);
  if (log_fd >= 0) close(log_fd);
  snprintf(root, sizeof root, "%s", under);
  log_fd = -1;
  if (log[0] != 0) {
    log_fd = NEXT(open)(log, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600);
  }
  pthread_mutex_unlock(&mutex);
  return log_fd;
}

#define DEFINE_OPEN(name)                                                                \
  int name(const char* path, int flags, ...) {                                           \
    va_list more;                                                                        \
    va_start(more, flags);                                                               \
    const mode_t mode = mode_of(flags, more);                                            \
    va_end(more);                                                                        \
    return opened(AT_FDCWD, path, flags, [&] { return NEXT(name)(path, flags, mode); }); \
  }
#define DEFINE_OPENAT(name)                                                            \
  int name(int at, const char* path, int flags, ...) {                                 \
    va_list more;                                                                      \
    va_start(more, flags);                                                             \
    const mode_t mode = mode_of(flags, more);                                          \
    va_end(more);                                                                      \
    return opened(at, path, flags, [&] { return NEXT(name)(at, path, flags, mode); }); \
  }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)
DEFINE_OPENAT(openat)
DEFINE_OPENAT(openat64)

#define DEFINE_PWRITE(name, Offset)                                      \
  ssize_t name(int fd, const void* data, size_t nbytes, Offset offset) { \
    const ssize_t done = NEXT(name)(fd, data, nbytes, offset);           \
    written(fd, static_cast<uint64_t>(offset), data, done);              \
    return done;                                                         \
  }
DEFINE_PWRITE(pwrite, off_t)
DEFINE_PWRITE(pwrite64, off64_t)

#define DEFINE_PWRITEV(name, Offset)                                      \
  ssize_t name(int fd, const iovec* parts, int count, Offset offset) {    \
    const ssize_t done = NEXT(name)(fd, parts, count, offset);            \
    parts_written(fd, static_cast<uint64_t>(offset), parts, count, done); \
    return done;                                                          \
  }
#define DEFINE_PWRITEV2(name, Offset)                                             \
  ssize_t name(int fd, const iovec* parts, int count, Offset offset, int flags) { \
    const ssize_t done = NEXT(name)(fd, parts, count, offset, flags);             \
    parts_written(fd, static_cast<uint64_t>(offset), parts, count, done);         \
    return done;                                                                  \
  }
DEFINE_PWRITEV(pwritev, off_t)
DEFINE_PWRITEV(pwritev64, off64_t)
DEFINE_PWRITEV2(pwritev2, off_t)  // Python's os.pwritev()
DEFINE_PWRITEV2(pwritev64v2, off64_t)

ssize_t write(int fd, const void* data, size_t nbytes) {
  const ssize_t done = NEXT(write)(fd, data, nbytes);
  struct stat found;
  if (done > 0 && log_fd >= 0 && fd != log_fd && follows(fd, &found)) {
    const off64_t end = lseek64(fd, 0, SEEK_CUR);
    if (end >= done) written(fd, static_cast<uint64_t>(end - done), data, done);
  }
  return done;
}

ssize_t sendfile(int, int, off_t*, size_t) { return errno = EINVAL, -1; }
ssize_t sendfile64(int, int, off64_t*, size_t) { return errno = EINVAL, -1; }
ssize_t copy_file_range(int, off64_t*, int, off64_t*, size_t, unsigned) {
  return errno = EINVAL, -1;
}

#define DEFINE_TRUNCATE(name, Offset)        \
  int name(int fd, Offset size) {            \
    const int result = NEXT(name)(fd, size); \
    if (result == 0) resized(fd);            \
    return result;                           \
  }
DEFINE_TRUNCATE(ftruncate, off_t)
DEFINE_TRUNCATE(ftruncate64, off64_t)

#define DEFINE_FALLOCATE(name, Offset)                 \
  int name(int fd, Offset offset, Offset nbytes) {     \
    const int result = NEXT(name)(fd, offset, nbytes); \
    if (result == 0) resized(fd);                      \
    return result;                                     \
  }
DEFINE_FALLOCATE(posix_fallocate, off_t)
DEFINE_FALLOCATE(posix_fallocate64, off64_t)

int fsync(int fd) {
  return synced(fd, [&] { return NEXT(fsync)(fd); });
}
int fdatasync(int fd) {
  return synced(fd, [&] { return NEXT(fdatasync)(fd); });
}

int mkdirat(int at, const char* path, mode_t mode) {
  const int result = NEXT(mkdirat)(at, path, mode);
  struct stat found;
  const Name name(at, path);
  if (result == 0 && name.followed && stat(name.whole, &found) == 0) {
    name.changed(kMakeFolder, found.st_ino);
  }
  return result;
}
int mkdir(const char* path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int unlinkat(int at, const char* path, int flags) {
  const Name name(at, path);
  const int result = NEXT(unlinkat)(at, path, flags);
  if (result == 0) name.changed(kRemove, 0);
  return result;
}
int unlink(const char* path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char* path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int renameat2(int from_at, const char* from, int to_at, const char* to, unsigned flags) {
  const Name one(from_at, from), other(to_at, to);
  const int result = NEXT(renameat2)(from_at, from, to_at, to, flags);
  if (result == 0) renamed((flags & RENAME_EXCHANGE) != 0 ? kExchange : kRename, one, other);
  return result;
}
int renameat(int from_at, const char* from, int to_at, const char* to) {
  return renameat2(from_at, from, to_at, to, 0);
}
int rename(const char* from, const char* to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }

}  // extern "C"
