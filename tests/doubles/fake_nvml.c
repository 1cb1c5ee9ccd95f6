/* A fake libnvidia-ml.so.1: NVIDIA's own Python bindings load it, unmodified, in place of the driver's library.
 *
 * It has the functions that kvheadroom calls and no more. What it answers stands in the text file named by
 * $FAKE_NVML_STATE, which is read again whenever it changes, so a test moves memory, loses a GPU or slows a call
 * under a running program. One record a line:
 *
 *     driver 580.95.05
 *     init 18                                            what the initialisation answers, an nvmlReturn_t
 *     gpu GPU-1 143771 622 1000 142149 -1 NVIDIA H200    total reserved used free (bytes), MIG mode, name
 *     mig GPU-1 3 MIG-1 9 0 19968 10 500 19458 H200 MIG  parent, slot, UUID, GPU and compute instance, then as a GPU
 *     proc GPU-1 4242 500                                a compute process and its bytes, -1 where they are not told
 *     xid GPU-1 79 1 -1 -1                               code, its number in the order of events, instances or -1
 *     fault nvmlDeviceGetMemoryInfo_v2 GPU-1 15          function and GPU, each may be *
 *     delay nvmlDeviceGetMemoryInfo_v2 * 50              milliseconds
 *
 * A MIG mode of -1 is a GPU that knows no MIG; with 1 the whole GPU's memory is told to nobody, as the driver does without
 * privileges. An event is told once, to those who registered before it happened. With $FAKE_NVML_CALLS every call is appended to that file, as the
 * function's name and the GPU.
 *
 * As the driver's does, it counts the GPUs when it is initialised, so one that comes later is seen after the next
 * initialisation; a lost GPU stays lost and an old handle stays dead until then.
 *
 *     gcc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 fake_nvml.c
 *
 * With -DWITHOUT_MEMORY_V2 it lacks that function, as drivers before 510 do; with -DWITHOUT_NEWER also MIG, events of
 * the second kind and lists of processes of the third. */

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMED_OUT = 10,
    GPU_IS_LOST = 15,
    ARGUMENT_VERSION_MISMATCH = 25,
};

typedef unsigned long long bytes_t;
typedef struct { bytes_t total, free, used; } memory_v1_t;
typedef struct { unsigned version; bytes_t total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned pid; bytes_t used; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { void *device; bytes_t type, data; unsigned gpu_instance, compute_instance; } event_t;

/* nvml.h: NVML_STRUCT_VERSION(Memory, 2) */
#define MEMORY_V2 (sizeof(memory_v2_t) | 2u << 24)
_Static_assert(sizeof(memory_v1_t) == 24, "nvmlMemory_t");
_Static_assert(MEMORY_V2 == 0x02000028, "nvmlMemory_v2");
_Static_assert(sizeof(process_t) == 24, "nvmlProcessInfo_t");
_Static_assert(sizeof(event_t) == 32, "nvmlEventData_t");

#define XID_EVENT 8
#define MAX_SLOTS 7

#define MAX_GPUS 64
#define MAX_RULES 64
#define TEXT 96 /* NVML_DEVICE_UUID_V2_BUFFER_SIZE, NVML_DEVICE_NAME_V2_BUFFER_SIZE */

typedef struct {
    char uuid[TEXT], name[TEXT], parent[TEXT];
    bytes_t total, reserved, used, free;
    int mig, slot, gpu_instance, compute_instance;
} gpu_t;
typedef struct { char uuid[TEXT]; unsigned pid; long long used; } proc_t;
typedef struct { char uuid[TEXT]; int code, number, gpu_instance, compute_instance; } xid_t;
typedef struct { char function[TEXT], uuid[TEXT]; int value; } rule_t;

static struct {
    gpu_t gpus[MAX_GPUS], migs[MAX_GPUS];
    proc_t procs[MAX_RULES];
    xid_t xids[MAX_RULES];
    rule_t faults[MAX_RULES], delays[MAX_RULES];
    int num_gpus, num_migs, num_procs, num_xids, num_faults, num_delays, init;
    char driver[TEXT];
} state;

/* What one initialisation saw. A handle is its number, a MIG slot plus 1 or 0, and the GPU's place in it. */
static struct { char uuid[TEXT]; int lost, registered; } seen[MAX_GPUS];
static int num_seen, references, last_xid;
static uintptr_t session;

static void read_state(void) {
    static struct stat last;
    struct stat now;
    const char *path = getenv("FAKE_NVML_STATE");
    FILE *file = path && !stat(path, &now) ? fopen(path, "r") : NULL;
    if (!file) {
        state.init = DRIVER_NOT_LOADED;
        return;
    }
    if (now.st_ino == last.st_ino && !memcmp(&now.st_mtim, &last.st_mtim, sizeof now.st_mtim)) {
        fclose(file);
        return;
    }
    last = now;
    memset(&state, 0, sizeof state);
    char line[512];
    while (fgets(line, sizeof line, file)) {
        gpu_t gpu = {0};
        gpu_t mig = {.mig = -1};
        proc_t proc = {0};
        xid_t xid = {0};
        rule_t rule = {0};
        if (sscanf(line, "gpu %95s %llu %llu %llu %llu %d %95[^\n]", gpu.uuid, &gpu.total, &gpu.reserved,
                   &gpu.used, &gpu.free, &gpu.mig, gpu.name) == 7 && state.num_gpus < MAX_GPUS)
            state.gpus[state.num_gpus++] = gpu;
        else if (sscanf(line, "mig %95s %d %95s %d %d %llu %llu %llu %llu %95[^\n]", mig.parent, &mig.slot, mig.uuid,
                        &mig.gpu_instance, &mig.compute_instance, &mig.total, &mig.reserved, &mig.used, &mig.free,
                        mig.name) == 10 && state.num_migs < MAX_GPUS)
            state.migs[state.num_migs++] = mig;
        else if (sscanf(line, "proc %95s %u %lld", proc.uuid, &proc.pid, &proc.used) == 3 &&
                 state.num_procs < MAX_RULES)
            state.procs[state.num_procs++] = proc;
        else if (sscanf(line, "xid %95s %d %d %d %d", xid.uuid, &xid.code, &xid.number, &xid.gpu_instance,
                        &xid.compute_instance) == 5 && state.num_xids < MAX_RULES)
            state.xids[state.num_xids++] = xid;
        else if (sscanf(line, "fault %95s %95s %d", rule.function, rule.uuid, &rule.value) == 3 &&
                 state.num_faults < MAX_RULES)
            state.faults[state.num_faults++] = rule;
        else if (sscanf(line, "delay %95s %95s %d", rule.function, rule.uuid, &rule.value) == 3 &&
                 state.num_delays < MAX_RULES)
            state.delays[state.num_delays++] = rule;
        else if (sscanf(line, "init %d", &state.init) != 1 && sscanf(line, "driver %95s", state.driver) != 1) {
            fprintf(stderr, "fake_nvml: no such record: %s", line);
            abort(); /* a mistake in a test must not look like an answer */
        }
    }
    fclose(file);
}

static int rule_for(const rule_t *rules, int count, const char *function, const char *uuid) {
    for (int i = 0; i < count; i++)
        if ((!strcmp(rules[i].function, "*") || !strcmp(rules[i].function, function)) &&
            (!strcmp(rules[i].uuid, "*") || !strcmp(rules[i].uuid, uuid)))
            return rules[i].value;
    return 0;
}

static void note(const char *function, const char *uuid) {
    const char *path = getenv("FAKE_NVML_CALLS");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file)
        return;
    fprintf(file, "%s %s\n", function, uuid);
    fclose(file);
}

/* One call at a time touches what is here, though not while it sleeps: NVML may be called from several threads. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void leave(int *unused) {
    (void)unused;
    pthread_mutex_unlock(&mutex);
}

#define ENTER \
    int entered __attribute__((cleanup(leave))) = pthread_mutex_lock(&mutex); \
    (void)entered

/* What every call begins with: the state of now, a line in the calls, the delay, the fault. */
static int begin(const char *function, const char *uuid) {
    read_state();
    note(function, uuid);
    int wait = rule_for(state.delays, state.num_delays, function, uuid);
    struct timespec pause = {wait / 1000, wait % 1000 * 1000000L};
    if (wait) { /* a sleep of nothing still costs 50 us */
        pthread_mutex_unlock(&mutex);
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&mutex);
    }
    if (!references && strncmp(function, "nvmlInit", 8))
        return UNINITIALIZED;
    return rule_for(state.faults, state.num_faults, function, uuid);
}

static int begin_at(const char *function, int place, gpu_t **gpu) {
    int code = begin(function, seen[place].uuid);
    for (int i = 0; !code && !seen[place].lost && i < state.num_gpus; i++)
        if (!strcmp(state.gpus[i].uuid, seen[place].uuid)) {
            *gpu = &state.gpus[i];
            return SUCCESS;
        }
    if (!code || code == GPU_IS_LOST)
        seen[place].lost = 1;
    return code ? code : GPU_IS_LOST;
}

static gpu_t *mig_in(const char *parent, int slot) {
    for (int i = 0; i < state.num_migs; i++)
        if (!strcmp(state.migs[i].parent, parent) && state.migs[i].slot == slot)
            return &state.migs[i];
    return NULL;
}

static void *handle_of(int place, int slot) {
    return (void *)(session << 16 | (uintptr_t)(slot + 1) << 8 | (uintptr_t)place);
}

static int begin_on(const char *function, void *handle, gpu_t **gpu) {
    int place = (uintptr_t)handle & 0xff, slot = ((uintptr_t)handle >> 8 & 0xff) - 1;
    if ((uintptr_t)handle >> 16 != session || place >= num_seen)
        return begin(function, "an_old_handle") ? UNINITIALIZED : INVALID_ARGUMENT;
    if (slot < 0)
        return begin_at(function, place, gpu);
    *gpu = mig_in(seen[place].uuid, slot);
    int code = begin(function, *gpu ? (*gpu)->uuid : "a_mig_device_that_is_gone");
    *gpu = mig_in(seen[place].uuid, slot);
    return code ? code : seen[place].lost ? GPU_IS_LOST : *gpu ? SUCCESS : INVALID_ARGUMENT;
}

static int give(const char *text, char *to, unsigned size) {
    if (strlen(text) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    static char text[TEXT];
    snprintf(text, sizeof text, "fake error %d", code);
    return text;
}

int nvmlInitWithFlags(unsigned flags) {
    ENTER;
    (void)flags;
    int code = begin(__func__, "*");
    if (code || state.init)
        return code ? code : state.init;
    if (references++)
        return SUCCESS;
    session++;
    num_seen = state.num_gpus;
    memset(seen, 0, sizeof seen);
    for (int i = 0; i < num_seen; i++)
        strcpy(seen[i].uuid, state.gpus[i].uuid);
    return SUCCESS;
}

int nvmlShutdown(void) {
    ENTER;
    int code = begin(__func__, "*");
    if (!code)
        references--;
    return code;
}

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    ENTER;
    int code = begin(__func__, "*");
    return code ? code : give(state.driver, version, size);
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER;
    int code = begin(__func__, "*");
    *count = num_seen;
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    ENTER;
    gpu_t *gpu;
    if (index >= (unsigned)num_seen)
        return INVALID_ARGUMENT;
    *handle = handle_of(index, -1);
    return begin_at(__func__, index, &gpu);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    ENTER;
    gpu_t *gpu;
    for (int place = 0; place < num_seen; place++)
        if (!strcmp(seen[place].uuid, uuid)) {
            *handle = handle_of(place, -1);
            return begin_at(__func__, place, &gpu);
        }
    return NOT_FOUND;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned size) {
    ENTER;
    gpu_t *gpu;
    int code = begin_on(__func__, handle, &gpu);
    return code ? code : give(gpu->name, name, size);
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size) {
    ENTER;
    gpu_t *gpu;
    int code = begin_on(__func__, handle, &gpu);
    return code ? code : give(gpu->uuid, uuid, size);
}

/* nvml.h: by v1, used contains what is reserved */
int nvmlDeviceGetMemoryInfo(void *handle, memory_v1_t *memory) {
    ENTER;
    gpu_t *gpu;
    int code = begin_on(__func__, handle, &gpu);
    if (!code && gpu->mig == 1)
        return NO_PERMISSION;
    if (!code)
        *memory = (memory_v1_t){.total = gpu->total, .free = gpu->free, .used = gpu->used + gpu->reserved};
    return code;
}

#ifndef WITHOUT_MEMORY_V2
int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2_t *memory) {
    ENTER;
    gpu_t *gpu;
    int code = begin_on(__func__, handle, &gpu);
    if (code)
        return code;
    if (memory->version != MEMORY_V2)
        return ARGUMENT_VERSION_MISMATCH;
    if (gpu->mig == 1)
        return NO_PERMISSION;
    *memory = (memory_v2_t){MEMORY_V2, gpu->total, gpu->reserved, gpu->free, gpu->used};
    return SUCCESS;
}
#endif

#ifndef WITHOUT_NEWER
int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    ENTER;
    gpu_t *gpu;
    int code = begin_on(__func__, handle, &gpu);
    if (code)
        return code;
    if (gpu->mig < 0)
        return NOT_SUPPORTED;
    *current = *pending = gpu->mig;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
    ENTER;
    gpu_t *gpu;
    int code = begin_on(__func__, handle, &gpu);
    if (!code)
        *count = gpu->mig == 1 ? MAX_SLOTS : 0;
    return code;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned slot, void **mig) {
    ENTER;
    gpu_t *gpu;
    int code = begin_on(__func__, handle, &gpu);
    if (code)
        return code;
    if (!mig_in(gpu->uuid, slot))
        return NOT_FOUND;
    *mig = handle_of((uintptr_t)handle & 0xff, slot);
    return SUCCESS;
}

static int instance(const char *function, void *handle, unsigned *id, int compute) {
    gpu_t *gpu;
    int code = begin_on(function, handle, &gpu);
    if (code)
        return code;
    if (!gpu->parent[0])
        return NOT_SUPPORTED;
    *id = compute ? gpu->compute_instance : gpu->gpu_instance;
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(void *handle, unsigned *id) {
    ENTER;
    return instance(__func__, handle, id, 0);
}

int nvmlDeviceGetComputeInstanceId(void *handle, unsigned *id) {
    ENTER;
    return instance(__func__, handle, id, 1);
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process_t *processes) {
    ENTER;
    gpu_t *gpu;
    int code = begin_on(__func__, handle, &gpu);
    unsigned found = 0;
    for (int i = 0; !code && i < state.num_procs; i++)
        if (!strcmp(state.procs[i].uuid, gpu->uuid)) {
            if (processes && found < *count)
                processes[found] = (process_t){state.procs[i].pid, state.procs[i].used, -1, -1};
            found++;
        }
    if (!code && found > (processes ? *count : 0))
        code = INSUFFICIENT_SIZE;
    *count = found;
    return code;
}
#endif

int nvmlEventSetCreate(void **set) {
    ENTER;
    int code = begin(__func__, "*");
    *set = (void *)session;
    for (int i = 0; i < state.num_xids; i++)
        if (state.xids[i].number > last_xid)
            last_xid = state.xids[i].number; /* it happened before anybody listened */
    return code;
}

int nvmlEventSetFree(void *set) {
    ENTER;
    (void)set;
    return begin(__func__, "*");
}

int nvmlDeviceRegisterEvents(void *handle, bytes_t types, void *set) {
    ENTER;
    gpu_t *gpu;
    int code = begin_on(__func__, handle, &gpu);
    if (!code && (types != XID_EVENT || set != (void *)session))
        code = INVALID_ARGUMENT;
    if (!code)
        seen[(uintptr_t)handle & 0xff].registered = 1;
    return code;
}

#ifndef WITHOUT_NEWER
/* It waits for nobody: what a test wants to last, it delays. */
int nvmlEventSetWait_v2(void *set, event_t *event, unsigned milliseconds) {
    ENTER;
    (void)milliseconds;
    int code = begin(__func__, "*");
    if (code || set != (void *)session)
        return code ? code : INVALID_ARGUMENT;
    for (int i = 0; i < state.num_xids; i++)
        for (int place = 0; place < num_seen; place++) {
            xid_t *xid = &state.xids[i];
            if (xid->number <= last_xid || !seen[place].registered || strcmp(seen[place].uuid, xid->uuid))
                continue;
            last_xid = xid->number;
            *event = (event_t){handle_of(place, -1), XID_EVENT, xid->code, xid->gpu_instance, xid->compute_instance};
            return SUCCESS;
        }
    return TIMED_OUT;
}
#endif
