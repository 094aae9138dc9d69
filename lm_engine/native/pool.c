/* Threads that help the caller through the tasks of one kernel.
 *
 * The caller works too and waits for tasks, never for threads: a helper that the system has not scheduled costs
 * nothing but its help. Fork-join pools (OpenMP) wait for every thread at every join, which on a machine with other
 * work to do is a time slice per kernel. Helpers spin shortly between kernels, then sleep. */
#include "kernels.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_JOBS = 4, MAX_HELPERS = 255, HELPER_STACK_BYTES = 2 << 20, SPIN_NS = 200 * 1000 };

/* A helper reads the fields, then takes a task by exchanging the ticket it saw. The exchange fails if the job has
 * been replaced meanwhile: a new job is published only after all tasks of the old one were taken and finished, and
 * the generation in the ticket is never the same again.
 *
 * The caller takes tasks from the first on, helpers from the last on: with one helper each walks through memory of its
 * own in one direction, and what it asks for ahead of time is what it will read. */
enum { COUNT_BITS = 20, MAX_COUNT = (1 << COUNT_BITS) - 1 };
#define FIRST_TAKEN 1ull
#define LAST_TAKEN (1ull << COUNT_BITS)
#define GENERATION (1ull << 2 * COUNT_BITS)

struct job {
    _Atomic uint64_t ticket; /* generation, tasks taken from the end, tasks taken from the beginning */
    _Atomic uint32_t count, finished;
    _Atomic int32_t helpers;
    _Atomic(task_function *) run;
    _Atomic(const void *) context;
    _Atomic int32_t in_use;
} __attribute__((aligned(64)));

static struct job jobs[MAX_JOBS];
static pthread_mutex_t growing = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int32_t num_helpers;
static _Atomic int32_t sleepers;
static _Atomic uint32_t wake_count; /* the futex that idle helpers sleep on */

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static uint32_t taken_first(uint64_t ticket) { return ticket & MAX_COUNT; }
static uint32_t taken_last(uint64_t ticket) { return ticket >> COUNT_BITS & MAX_COUNT; }

static int has_task(struct job *job, int32_t helper) {
    const uint64_t ticket = atomic_load(&job->ticket);
    return taken_first(ticket) + taken_last(ticket) < atomic_load(&job->count) && helper < atomic_load(&job->helpers);
}

/* Takes and runs tasks until there are none left; returns how many. `helper` is -1 for the caller. */
static int work(struct job *job, int32_t helper) {
    int done = 0;
    for (;;) {
        uint64_t ticket = atomic_load(&job->ticket);
        const uint32_t count = atomic_load(&job->count), first = taken_first(ticket), last = taken_last(ticket);
        if (first + last >= count || helper >= atomic_load(&job->helpers)) return done;
        task_function *run = atomic_load(&job->run); /* after the count: it is published last */
        const void *context = atomic_load(&job->context);
        const uint64_t taken = helper < 0 ? FIRST_TAKEN : LAST_TAKEN;
        if (!atomic_compare_exchange_weak(&job->ticket, &ticket, ticket + taken)) continue;
        run(context, helper < 0 ? first : count - 1 - last);
        atomic_fetch_add(&job->finished, 1);
        done++;
    }
}

static int any_task(int32_t helper) {
    for (int j = 0; j < MAX_JOBS; j++)
        if (has_task(&jobs[j], helper)) return 1;
    return 0;
}

static void sleep_until_woken(int32_t helper) {
    const uint32_t seen = atomic_load(&wake_count);
    atomic_fetch_add(&sleepers, 1); /* before the last look: a publisher sees the sleeper or we see its job */
    if (!any_task(helper)) syscall(SYS_futex, &wake_count, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&sleepers, 1);
}

static void *help(void *argument) {
    const int32_t helper = (int32_t)(intptr_t)argument;
    int64_t idle_since = now_ns();
    for (;;) {
        int done = 0;
        for (int j = 0; j < MAX_JOBS; j++) done += work(&jobs[j], helper);
        if (done) {
            idle_since = now_ns();
        } else if (now_ns() - idle_since < SPIN_NS) {
            relax();
        } else {
            sleep_until_woken(helper);
            idle_since = now_ns();
        }
    }
    return NULL;
}

/* The child of a fork has none of the helpers, and no kernel of the parent goes on in it. */
static void forget(void) {
    for (int j = 0; j < MAX_JOBS; j++) {
        atomic_store(&jobs[j].count, 0);
        atomic_store(&jobs[j].in_use, 0);
    }
    atomic_store(&num_helpers, 0);
    atomic_store(&sleepers, 0);
    pthread_mutex_init(&growing, NULL);
}

static void start_helpers(int32_t wanted) {
    static int watching_forks;
    pthread_mutex_lock(&growing);
    if (!watching_forks) watching_forks = !pthread_atfork(NULL, NULL, forget);
    sigset_t all, before;
    sigfillset(&all); /* signals belong to the interpreter's threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, HELPER_STACK_BYTES);
    int32_t running = atomic_load(&num_helpers);
    for (pthread_t thread; running < wanted; running++)
        if (pthread_create(&thread, &attributes, help, (void *)(intptr_t)running)) break; /* fewer must do */
    atomic_store(&num_helpers, running);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_mutex_unlock(&growing);
}

static struct job *claim_job(void) {
    for (int j = 0; j < MAX_JOBS; j++) {
        int32_t unused = 0;
        if (atomic_compare_exchange_strong(&jobs[j].in_use, &unused, 1)) return &jobs[j];
    }
    return NULL;
}

static void publish(struct job *job, int32_t helpers, uint32_t count, task_function *run, const void *context) {
    const uint64_t ticket = atomic_load(&job->ticket);
    atomic_store(&job->count, 0); /* closed while the fields change */
    atomic_store(&job->ticket, ticket / GENERATION * GENERATION + GENERATION);
    atomic_store(&job->run, run);
    atomic_store(&job->context, context);
    atomic_store(&job->helpers, helpers);
    atomic_store(&job->finished, 0);
    atomic_store(&job->count, count);
    if (atomic_load(&sleepers) == 0) return;
    atomic_fetch_add(&wake_count, 1);
    syscall(SYS_futex, &wake_count, FUTEX_WAKE_PRIVATE, helpers, NULL, NULL, 0);
}

void run_tasks(int32_t threads, int64_t count, task_function *run, const void *context) {
    const int32_t helpers = (int32_t)min64(min64(threads, count) - 1, MAX_HELPERS);
    struct job *job = helpers > 0 && count <= MAX_COUNT ? claim_job() : NULL;
    if (!job) { /* alone, also when as many kernels as there are jobs run at once */
        for (int64_t task = 0; task < count; task++) run(context, task);
        return;
    }
    if (atomic_load(&num_helpers) < helpers) start_helpers(helpers);
    publish(job, helpers, (uint32_t)count, run, context);
    work(job, -1);
    const int64_t waiting_since = now_ns();
    while (atomic_load(&job->finished) < (uint32_t)count) {
        if (now_ns() - waiting_since < SPIN_NS) relax();
        else sched_yield(); /* the helper may need this core to finish */
    }
    atomic_store(&job->in_use, 0);
}
