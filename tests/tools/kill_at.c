// fault_tool_test loads this. It watches a process with SQZ_KILL_DIR, a folder, in
// its environment. The SQZ_KILL_AT-th call (from 0) that changes files in there kills the process,
// a write half-way; with SQZ_FAIL_WITH, an errno, it fails once instead (0: a write is short). With
// SQZ_NO_TMPFILE the file system has no unnamed files. The process says that it is number 4242. At
// its end it writes how many such calls there were to SQZ_KILL_COUNT, if that is a file.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static atomic_long calls;
static atomic_bool ours[1024];  // open files

static int in_folder(const char* path) {
  const char* folder = getenv("SQZ_KILL_DIR");
  return folder != NULL && strncmp(path, folder, strlen(folder)) == 0;
}

static int is_watched(void) {
  return getenv("SQZ_KILL_DIR") != NULL;
}

static int is_ours(int fd) {
  return fd >= 0 && fd < 1024 && ours[fd];
}

// Whether the next call is the one.
static int is_chosen(void) {
  const char* at = getenv("SQZ_KILL_AT");
  return atomic_fetch_add(&calls, 1) == (at == NULL ? -1 : atol(at));
}

// Dies or, with SQZ_FAIL_WITH, returns -1 with that errno.
static int fail(void) {
  const char* with = getenv("SQZ_FAIL_WITH");
  if (with == NULL) syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
  errno = atoi(with) != 0 ? atoi(with) : EINTR;
  return -1;
}

void _exit(int code) {
  const char* path = getenv("SQZ_KILL_COUNT");
  FILE* file = path == NULL ? NULL : fopen(path, "w");
  if (file != NULL) {
    fprintf(file, "%ld", calls);
    fclose(file);
  }
  for (;;) syscall(SYS_exit_group, code);
}

pid_t getpid(void) {
  return is_watched() ? 4242 : (pid_t)syscall(SYS_getpid);
}

int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = va_arg(more, mode_t);
  va_end(more);
  const int changes = (flags & O_ACCMODE) != O_RDONLY && in_folder(path);
  if (changes && (flags & O_TMPFILE) == O_TMPFILE && getenv("SQZ_NO_TMPFILE") != NULL) {
    errno = EOPNOTSUPP;
    return -1;
  }
  if (changes && is_chosen()) return fail();
  const int fd = REAL(open)(path, flags, mode);
  if (fd >= 0 && fd < 1024) ours[fd] = changes;
  return fd;
}

ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  if (is_ours(fd) && is_chosen()) {
    const char* with = getenv("SQZ_FAIL_WITH");
    if (with == NULL || atoi(with) == 0) {
      const ssize_t half = REAL(pwrite)(fd, data, (size + 1) / 2, offset);
      if (with != NULL) return half;
    }
    return fail();
  }
  return REAL(pwrite)(fd, data, size, offset);
}

int fsync(int fd) {
  if (is_watched() && is_chosen()) return fail();
  return REAL(fsync)(fd);
}

int ftruncate(int fd, off_t size) {
  if (is_ours(fd) && is_chosen()) return fail();
  return REAL(ftruncate)(fd, size);
}

int fchmod(int fd, mode_t mode) {
  if (is_ours(fd) && is_chosen()) return fail();
  return REAL(fchmod)(fd, mode);
}

int flock(int fd, int operation) {
  if (is_ours(fd) && is_chosen()) return fail();
  return REAL(flock)(fd, operation);
}

int close(int fd) {
  if (is_ours(fd)) {
    ours[fd] = 0;
    if (is_chosen()) {
      if (getenv("SQZ_FAIL_WITH") != NULL) REAL(close)(fd);  // as close() does that fails
      return fail();
    }
  }
  return REAL(close)(fd);
}

int linkat(int from, const char* old, int to, const char* path, int flags) {
  if (in_folder(path) && is_chosen()) return fail();
  return REAL(linkat)(from, old, to, path, flags);
}

int renameat2(int from, const char* old, int to, const char* path, unsigned flags) {
  if (in_folder(path) && is_chosen()) return fail();
  return REAL(renameat2)(from, old, to, path, flags);
}

int unlink(const char* path) {
  if (in_folder(path) && is_chosen()) return fail();
  return REAL(unlink)(path);
}
