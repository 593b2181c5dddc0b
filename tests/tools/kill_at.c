// Of crash_test: kills a process with SQZ_KILL_DIR, a folder, in its environment at the
// SQZ_KILL_AT-th call (from 0) that changes files in there; a write is killed half-way. With
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

// Whether this call is the last.
static int is_last(void) {
  const char* at = getenv("SQZ_KILL_AT");
  return atomic_fetch_add(&calls, 1) == (at == NULL ? -1 : atol(at));
}

static void die(void) {
  syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
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
  if (changes && is_last()) die();
  const int fd = REAL(open)(path, flags, mode);
  if (fd >= 0 && fd < 1024) ours[fd] = changes;
  return fd;
}

ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  if (is_ours(fd) && is_last()) {
    REAL(pwrite)(fd, data, size / 2, offset);
    die();
  }
  return REAL(pwrite)(fd, data, size, offset);
}

int fsync(int fd) {
  if (is_watched() && is_last()) die();
  return REAL(fsync)(fd);
}

int fchmod(int fd, mode_t mode) {
  if (is_ours(fd) && is_last()) die();
  return REAL(fchmod)(fd, mode);
}

int flock(int fd, int operation) {
  if (is_ours(fd) && is_last()) die();
  return REAL(flock)(fd, operation);
}

int close(int fd) {
  if (is_ours(fd)) {
    ours[fd] = 0;
    if (is_last()) die();
  }
  return REAL(close)(fd);
}

int linkat(int from, const char* old, int to, const char* path, int flags) {
  if (in_folder(path) && is_last()) die();
  return REAL(linkat)(from, old, to, path, flags);
}

int renameat2(int from, const char* old, int to, const char* path, unsigned flags) {
  if (in_folder(path) && is_last()) die();
  return REAL(renameat2)(from, old, to, path, flags);
}

int unlink(const char* path) {
  if (in_folder(path) && is_last()) die();
  return REAL(unlink)(path);
}
