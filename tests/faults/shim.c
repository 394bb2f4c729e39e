/* A file system that misbehaves on order: calls of libc that touch files, with faults in front of or behind them.
 *
 * Preloaded into a process (LD_PRELOAD), it maps the table of rules that TIERKV_FAULTS names and looks at it in each
 * call. The table is shared memory: whoever has it mapped - a test, from this process or another - changes the rules
 * while the process runs, and reads how often each one was met. The layout is repeated in tests/faults/__init__.py.
 *
 * A call is matched by its kind and by a part of the path: of the name it was given, joined to the directory it is
 * relative to, or of the file behind its descriptor. Whatever matches no rule costs one comparison.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define N_RULES 32
#define N_IOV 16

enum kind {
    OPEN = 1, READ = 2, WRITE = 4, CLOSE = 8, RENAME = 16, UNLINK = 32, MKDIR = 64, SYNC = 128, STAT = 256, LIST = 512,
    LOCK = 1024, TIME = 2048, SPACE = 4096, MODE = 8192, SIZE = 16384,
};

struct rule {
    uint32_t active, kinds;
    int32_t error;        /* errno to fail with; 0: none */
    int32_t at_most;      /* bytes that a read or write moves; negative: all */
    uint32_t after;       /* the call is made, and its success kept quiet about */
    uint32_t flip;        /* one bit of what was read is another */
    uint64_t delay_us;
    uint32_t hang;        /* waits until this is zero */
    uint32_t kill;        /* the process ends by SIGKILL: in front of the call, or behind it */
    uint64_t first, count; /* which of the calls that match, from 1; a count of 0: all from the first on */
    uint64_t n_seen, n_struck, n_waiting;
    uint32_t log;         /* calls that are struck are written down before they are made */
    uint32_t pid;         /* only this process's calls; 0: everybody's */
    uint64_t start, end;   /* bytes of the file that a read or write must touch; an end of 0: any, and any other call */
    char path[160];
};

struct table {
    uint64_t magic;
    uint64_t n_active;
    int64_t clock_shift_ns; /* the wall clock is off by this */
    uint64_t spare[5];
    struct rule rules[N_RULES];
};

#define MAGIC 0x746c7561662d6b76ULL

static struct table nothing;
static struct table *volatile table = &nothing;
static char log_path[PATH_MAX];

#define REAL(name) ({ static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); real; })

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("TIERKV_FAULTS");
    int fd = path ? REAL(open64)(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *at = mmap(NULL, sizeof(struct table), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    REAL(close)(fd);
    if (at != MAP_FAILED && ((struct table *)at)->magic == MAGIC)
        table = at;
    snprintf(log_path, sizeof log_path, "%s.log", path);
}

static void pause_us(uint64_t us)
{
    struct timespec left = {us / 1000000, us % 1000000 * 1000};
    while (nanosleep(&left, &left) && errno == EINTR)
        ;
}

static void die(void)
{
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

static void write_down(enum kind kind, const char *path)
{
    char line[PATH_MAX + 16];
    int n = snprintf(line, sizeof line, "%d %s\n", __builtin_ctz(kind), path);
    int fd = REAL(open64)(log_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || REAL(write)(fd, line, n) != n) /* in one piece: other threads write, too */
        abort();
    REAL(close)(fd);
}

/* Whether a call of so many bytes from an offset on is one that the rule is about; -1: it is at no offset. */
static int touches(const struct rule *rule, off64_t offset, ssize_t nbytes)
{
    return !rule->end || (offset >= 0 && (uint64_t)offset < rule->end && (uint64_t)(offset + nbytes) > rule->start);
}

/* The rule that strikes this call, after its delay, or NULL. */
static struct rule *strike(enum kind kind, const char *path, off64_t offset, ssize_t nbytes)
{
    for (int i = 0; i < N_RULES; i++) {
        struct rule *rule = &table->rules[i];
        if (!__atomic_load_n(&rule->active, __ATOMIC_ACQUIRE) || !(rule->kinds & kind) || !strstr(path, rule->path))
            continue;
        if (!touches(rule, offset, nbytes) || (rule->pid && rule->pid != (uint32_t)getpid()))
            continue;
        uint64_t call = __atomic_add_fetch(&rule->n_seen, 1, __ATOMIC_RELAXED);
        if (call < rule->first || (rule->count && call >= rule->first + rule->count))
            continue;
        __atomic_add_fetch(&rule->n_struck, 1, __ATOMIC_RELAXED);
        if (rule->delay_us)
            pause_us(rule->delay_us);
        __atomic_add_fetch(&rule->n_waiting, 1, __ATOMIC_RELAXED);
        while (__atomic_load_n(&rule->hang, __ATOMIC_ACQUIRE) && __atomic_load_n(&rule->active, __ATOMIC_ACQUIRE))
            pause_us(1000);
        __atomic_sub_fetch(&rule->n_waiting, 1, __ATOMIC_RELAXED);
        if (rule->log)
            write_down(kind, path);
        if (rule->kill && !rule->after)
            die();
        return rule;
    }
    return NULL;
}

static int quiet(void)
{
    return !__atomic_load_n(&table->n_active, __ATOMIC_ACQUIRE);
}

static const char *path_of_fd(int fd, char *into)
{
    char link[32];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, into, PATH_MAX - 1);
    into[n > 0 ? n : 0] = 0;
    return into;
}

static const char *path_at(int dir_fd, const char *name, char *into)
{
    if (!name)
        return path_of_fd(dir_fd, into);
    if (name[0] == '/' || dir_fd == AT_FDCWD) {
        snprintf(into, PATH_MAX, "%s", name);
        return into;
    }
    path_of_fd(dir_fd, into);
    size_t n = strlen(into);
    snprintf(into + n, PATH_MAX - n, "/%s", name);
    return into;
}

static struct rule *strike_in(enum kind kind, int dir_fd, const char *name, off64_t offset, ssize_t nbytes)
{
    char path[PATH_MAX];
    int saved = errno;
    struct rule *rule = strike(kind, path_at(dir_fd, name, path), offset, nbytes);
    errno = saved;
    return rule;
}

static struct rule *strike_at(enum kind kind, int dir_fd, const char *name)
{
    return strike_in(kind, dir_fd, name, -1, 0);
}

/* Make the call unless a rule fails it in front; or make it and fail it all the same. */
#define CALL(kind, dir_fd, name, failed, call)                          \
    do {                                                                \
        if (quiet())                                                    \
            return call;                                                \
        struct rule *rule = strike_at(kind, dir_fd, name);              \
        if (rule && rule->kill) {                                       \
            (void)(call);                                               \
            die();                                                      \
        }                                                               \
        if (!rule || !rule->error)                                      \
            return call;                                                \
        int error = rule->error;                                        \
        if (rule->after && (call) == (failed))                          \
            return failed;                                              \
        errno = error;                                                  \
        return failed;                                                  \
    } while (0)

/* -- opening ------------------------------------------------------------------------------------------------------ */

#define WITH_MODE mode_t mode = 0; if (flags & (O_CREAT | __O_TMPFILE)) { va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); }

int open64(const char *name, int flags, ...) { WITH_MODE CALL(OPEN, AT_FDCWD, name, -1, REAL(open64)(name, flags, mode)); }
int open(const char *name, int flags, ...) { WITH_MODE CALL(OPEN, AT_FDCWD, name, -1, REAL(open)(name, flags, mode)); }
int openat64(int at, const char *name, int flags, ...) { WITH_MODE CALL(OPEN, at, name, -1, REAL(openat64)(at, name, flags, mode)); }
int openat(int at, const char *name, int flags, ...) { WITH_MODE CALL(OPEN, at, name, -1, REAL(openat)(at, name, flags, mode)); }
int close(int fd)
{
    if (quiet())
        return REAL(close)(fd);
    struct rule *rule = strike_at(CLOSE, fd, NULL);
    int answer = REAL(close)(fd); /* whatever close says, Linux has closed it */
    if (rule && rule->kill)
        die();
    if (!rule || !rule->error)
        return answer;
    errno = rule->error;
    return -1;
}

/* -- moving bytes ------------------------------------------------------------------------------------------------- */

static ssize_t total(const struct iovec *parts, int n)
{
    ssize_t sum = 0;
    for (int i = 0; i < n; i++)
        sum += parts[i].iov_len;
    return sum;
}

/* Of what was read from ``offset`` on, in the bytes that the rule is about. */
static void flip_a_bit(const struct rule *rule, const struct iovec *parts, int n, ssize_t moved, off64_t offset)
{
    ssize_t first = rule->end && (off64_t)rule->start > offset ? (ssize_t)(rule->start - offset) : 0;
    if (rule->end && (off64_t)rule->end - offset < moved)
        moved = rule->end - offset;
    ssize_t at = moved - 1; /* the last byte that is not zero: padding is not looked at by anybody */
    while (at >= first) {
        ssize_t in_part = at;
        int i = 0;
        while (i < n - 1 && in_part >= (ssize_t)parts[i].iov_len)
            in_part -= parts[i++].iov_len;
        char *byte = (char *)parts[i].iov_base + in_part;
        if (*byte) {
            *byte ^= 1;
            return;
        }
        at--;
    }
}

/* A read or write of parts, of which a rule may let only some bytes through. */
#define MOVE(kind, call_with)                                                            \
    do {                                                                                 \
        struct rule *rule = quiet() ? NULL : strike_in(kind, fd, NULL, offset, total(parts, n)); \
        if (!rule)                                                                       \
            return call_with(parts, n);                                                  \
        if (rule->error && !rule->after) {                                               \
            errno = rule->error;                                                         \
            return -1;                                                                   \
        }                                                                                \
        struct iovec cut[N_IOV];                                                         \
        int n_cut = 0;                                                                   \
        ssize_t left = rule->at_most < 0 ? total(parts, n) : rule->at_most;              \
        for (; n_cut < n && n_cut < N_IOV && left > 0; n_cut++) {                        \
            cut[n_cut] = parts[n_cut];                                                   \
            if ((ssize_t)cut[n_cut].iov_len > left)                                      \
                cut[n_cut].iov_len = left;                                               \
            left -= cut[n_cut].iov_len;                                                  \
        }                                                                                \
        ssize_t moved = n_cut ? call_with(cut, n_cut) : 0;                               \
        if (rule->kill)                                                                  \
            die();                                                                       \
        if (moved < 0)                                                                   \
            return moved;                                                                \
        if (rule->flip && kind == READ)                                                  \
            flip_a_bit(rule, cut, n_cut, moved, offset);                                 \
        if (rule->error) {                                                               \
            errno = rule->error;                                                         \
            return -1;                                                                   \
        }                                                                                \
        return moved;                                                                    \
    } while (0)

#define ONE struct iovec one = {(void *)data, length}, *parts = &one; int n = 1
#define P64V2(p, k) REAL(preadv64v2)(fd, p, k, offset, flags)
#define W64V2(p, k) REAL(pwritev64v2)(fd, p, k, offset, flags)
#define P64V(p, k) REAL(preadv64)(fd, p, k, offset)
#define W64V(p, k) REAL(pwritev64)(fd, p, k, offset)
#define P64(p, k) REAL(pread64)(fd, (p)->iov_base, (p)->iov_len, offset)
#define W64(p, k) REAL(pwrite64)(fd, (p)->iov_base, (p)->iov_len, offset)
#define R(p, k) REAL(read)(fd, (p)->iov_base, (p)->iov_len)
#define W(p, k) REAL(write)(fd, (p)->iov_base, (p)->iov_len)

ssize_t preadv64v2(int fd, const struct iovec *parts, int n, off64_t offset, int flags) { MOVE(READ, P64V2); }
ssize_t pwritev64v2(int fd, const struct iovec *parts, int n, off64_t offset, int flags) { MOVE(WRITE, W64V2); }
ssize_t preadv64(int fd, const struct iovec *parts, int n, off64_t offset) { MOVE(READ, P64V); }
ssize_t pwritev64(int fd, const struct iovec *parts, int n, off64_t offset) { MOVE(WRITE, W64V); }
ssize_t pread64(int fd, void *data, size_t length, off64_t offset) { ONE; MOVE(READ, P64); }
ssize_t pwrite64(int fd, const void *data, size_t length, off64_t offset) { ONE; MOVE(WRITE, W64); }
ssize_t read(int fd, void *data, size_t length) { ONE; off64_t offset = -1; MOVE(READ, R); }
ssize_t write(int fd, const void *data, size_t length) { ONE; off64_t offset = -1; MOVE(WRITE, W); }

/* -- names -------------------------------------------------------------------------------------------------------- */

int rename(const char *from, const char *to) { CALL(RENAME, AT_FDCWD, to, -1, REAL(rename)(from, to)); }
int renameat(int at, const char *from, int to_at, const char *to) { CALL(RENAME, to_at, to, -1, REAL(renameat)(at, from, to_at, to)); }
int unlink(const char *name) { CALL(UNLINK, AT_FDCWD, name, -1, REAL(unlink)(name)); }
int unlinkat(int at, const char *name, int flags) { CALL(UNLINK, at, name, -1, REAL(unlinkat)(at, name, flags)); }
int rmdir(const char *name) { CALL(UNLINK, AT_FDCWD, name, -1, REAL(rmdir)(name)); }
int mkdir(const char *name, mode_t mode) { CALL(MKDIR, AT_FDCWD, name, -1, REAL(mkdir)(name, mode)); }
int mkdirat(int at, const char *name, mode_t mode) { CALL(MKDIR, at, name, -1, REAL(mkdirat)(at, name, mode)); }

int chmod(const char *name, mode_t mode) { CALL(MODE, AT_FDCWD, name, -1, REAL(chmod)(name, mode)); }
int fchmod(int fd, mode_t mode) { CALL(MODE, fd, NULL, -1, REAL(fchmod)(fd, mode)); }
int fchmodat(int at, const char *name, mode_t mode, int flags) { CALL(MODE, at, name, -1, REAL(fchmodat)(at, name, mode, flags)); }
int ftruncate64(int fd, off64_t length) { CALL(SIZE, fd, NULL, -1, REAL(ftruncate64)(fd, length)); }
int fallocate(int fd, int how, off_t offset, off_t length) { CALL(SIZE, fd, NULL, -1, REAL(fallocate)(fd, how, offset, length)); }
int fallocate64(int fd, int how, off64_t offset, off64_t length) { CALL(SIZE, fd, NULL, -1, REAL(fallocate64)(fd, how, offset, length)); }

/* posix_fallocate says what went wrong by what it returns. */
int posix_fallocate64(int fd, off64_t offset, off64_t length)
{
    struct rule *rule = quiet() ? NULL : strike_at(SIZE, fd, NULL);
    if (rule && rule->error && !rule->after)
        return rule->error;
    int answer = REAL(posix_fallocate64)(fd, offset, length);
    if (rule && rule->kill)
        die();
    return rule && rule->error ? rule->error : answer;
}

/* -- looking, syncing, locking ------------------------------------------------------------------------------------ */

int stat64(const char *name, struct stat64 *found) { CALL(STAT, AT_FDCWD, name, -1, REAL(stat64)(name, found)); }
int lstat64(const char *name, struct stat64 *found) { CALL(STAT, AT_FDCWD, name, -1, REAL(lstat64)(name, found)); }
int fstat64(int fd, struct stat64 *found) { CALL(STAT, fd, NULL, -1, REAL(fstat64)(fd, found)); }
int fstatat64(int at, const char *name, struct stat64 *found, int flags) { CALL(STAT, at, name, -1, REAL(fstatat64)(at, name, found, flags)); }
int fstatvfs64(int fd, struct statvfs64 *found) { CALL(SPACE, fd, NULL, -1, REAL(fstatvfs64)(fd, found)); }
struct dirent64 *readdir64(DIR *directory) { CALL(LIST, dirfd(directory), NULL, NULL, REAL(readdir64)(directory)); }
int fsync(int fd) { CALL(SYNC, fd, NULL, -1, REAL(fsync)(fd)); }
int fdatasync(int fd) { CALL(SYNC, fd, NULL, -1, REAL(fdatasync)(fd)); }
int flock(int fd, int how) { CALL(LOCK, fd, NULL, -1, REAL(flock)(fd, how)); }
int utimensat(int at, const char *name, const struct timespec times[2], int flags) { CALL(TIME, at, name, -1, REAL(utimensat)(at, name, times, flags)); }
int futimens(int fd, const struct timespec times[2]) { CALL(TIME, fd, NULL, -1, REAL(futimens)(fd, times)); }

/* -- the wall clock ----------------------------------------------------------------------------------------------- */

int clock_gettime(clockid_t which, struct timespec *now)
{
    int answer = REAL(clock_gettime)(which, now);
    int64_t shift_ns = which == CLOCK_REALTIME ? __atomic_load_n(&table->clock_shift_ns, __ATOMIC_RELAXED) : 0;
    if (!answer && shift_ns) {
        int64_t ns = (int64_t)now->tv_sec * 1000000000 + now->tv_nsec + shift_ns;
        now->tv_sec = ns / 1000000000;
        now->tv_nsec = ns % 1000000000;
    }
    return answer;
}
