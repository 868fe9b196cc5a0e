// Stands in for NCCL where a machine has one GPU, which NCCL gives to one rank only: the functions that
// train_unet.cu calls, through memory that the processes of a machine share. Slow; for tests.
//
//   nvcc -shared -Xcompiler -fPIC tests/one_gpu_nccl.cu -o build/one_gpu_nccl.so
//   NCCL_LIBRARY=build/one_gpu_nccl.so, and a launcher's variables: RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 ...
#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <cuda_runtime.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

// What ncclGetUniqueId fills: here the name of the shared memory.
struct Id {
    char bytes[128];
};

// What one rank has sent to another and the other has not yet taken; bytes is 0 where nothing lies in it.
struct Mailbox {
    std::atomic<uint32_t> bytes;
    char data[1 << 20];
};

// A call of ncclSend, whose `to` is null, or of ncclRecv, whose `from` is null.
struct Message {
    int peer;
    const void* from;
    void* to;
    size_t bytes;
    char* staged;     // on the host
    size_t done = 0;  // bytes delivered in this run of the group
};

// The messages between ncclGroupStart and ncclGroupEnd.
struct Group {
    std::vector<Message> messages;
};

static int rank_here, ranks, depth;
static Mailbox* boxes;          // (ranks, ranks): from the first to the second
static std::atomic<int>* pids;  // (ranks), behind the boxes; 0 before and after a rank takes part
static char* staging;           // all groups' messages, one group after the other: they share a stream
static size_t staged;
static const size_t STAGING = (size_t)1 << 30;
static Group* open_group;
static cudaStream_t stream;

static Mailbox& box(int from, int to) { return boxes[from * ranks + to]; }

// Puts as much of a message as fits into its mailbox, or takes what lies there, if the other rank has done its part.
static void advance(Message* m) {
    if (m->from) {
        Mailbox& b = box(rank_here, m->peer);
        if (b.bytes) return;
        size_t n = std::min(sizeof b.data, m->bytes - m->done);
        memcpy(b.data, m->staged + m->done, n);
        m->done += n;
        b.bytes = (uint32_t)n;
    } else {
        Mailbox& b = box(m->peer, rank_here);
        if (!b.bytes) return;
        memcpy(m->staged + m->done, b.data, b.bytes);
        m->done += b.bytes;
        b.bytes = 0;
    }
}

// Moves what the messages hold between the staging memories of the ranks. Messages to a rank go one after the other,
// as do those from it, since they share a mailbox.
static void CUDART_CB deliver(void* group) {
    std::vector<Message>& messages = ((Group*)group)->messages;
    for (Message& m : messages) m.done = 0;
    bool all = false;
    while (!all) {
        std::vector<bool> sends(ranks), receives(ranks);
        all = true;
        for (Message& m : messages) {
            std::vector<bool>& busy = m.from ? sends : receives;
            if (!busy[m.peer] && m.done < m.bytes) advance(&m);
            if (m.done == m.bytes) continue;
            busy[m.peer] = true;
            all = false;
        }
        sched_yield();
    }
}

static int add(int peer, const void* from, void* to, size_t bytes, cudaStream_t on) {
    stream = on;
    if (staged + bytes > STAGING) {
        fprintf(stderr, "one_gpu_nccl: too much is exchanged\n");
        return 1;
    }
    open_group->messages.push_back({peer, from, to, bytes, staging + staged});
    staged += (bytes + 255) / 256 * 256;
    return 0;
}

extern "C" {
int ncclGetVersion(int* version) {
    *version = 99999;
    return 0;
}

int ncclGetUniqueId(Id* id) {
    snprintf(id->bytes, sizeof id->bytes, "/one_gpu_nccl_%d", getpid());
    return 0;
}

int ncclCommInitRank(void** comm, int size, Id id, int rank) {
    const char* host = getenv("NCCL_COMM_ID");  // the same for all, as NCCL takes it
    std::string name = host ? std::string("/one_gpu_nccl_") + host : id.bytes;
    rank_here = rank;
    ranks = size;

    // The boxes, the ranks' processes, and how many have arrived. New shared memory is zero.
    size_t bytes = (size_t)size * size * sizeof(Mailbox) + (size + 1) * sizeof(std::atomic<int>);
    int file = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, (off_t)bytes)) return 2;
    boxes = (Mailbox*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    pids = (std::atomic<int>*)(boxes + size * size);
    pids[rank] = getpid();
    std::atomic<int>& arrived = pids[size];
    arrived++;
    while (arrived < size) usleep(1000);
    shm_unlink(name.c_str());

    *comm = boxes;
    return cudaMallocHost((void**)&staging, STAGING) == cudaSuccess ? 0 : 1;
}

int ncclCommGetAsyncError(void*, int* status) {
    *status = 0;
    for (int rank = 0; rank < ranks; rank++) {
        int pid = pids[rank];
        bool has_died = pid && kill(pid, 0) != 0;
        if (has_died) *status = 6;  // ncclRemoteError
    }
    return 0;
}

int ncclCommFinalize(void*) {
    pids[rank_here] = 0;
    return 0;
}

int ncclCommDestroy(void*) { return 0; }

int ncclGroupStart() {
    if (depth == 0) {
        open_group = new Group;  // it stays, since a recorded graph replays it
        staged = 0;
    }
    depth++;
    return 0;
}

int ncclSend(const void* from, size_t bytes, int, int peer, void*, cudaStream_t on) {
    return add(peer, from, nullptr, bytes, on);
}

int ncclRecv(void* to, size_t bytes, int, int peer, void*, cudaStream_t on) {
    return add(peer, nullptr, to, bytes, on);
}

// Three steps on the stream: what is sent comes to the host, the ranks exchange it there, what is received goes back.
int ncclGroupEnd() {
    depth--;
    if (depth || open_group->messages.empty()) return 0;
    bool fine = true;
    for (Message& m : open_group->messages)
        if (m.from) fine &= !cudaMemcpyAsync(m.staged, m.from, m.bytes, cudaMemcpyDeviceToHost, stream);
    fine &= !cudaLaunchHostFunc(stream, deliver, open_group);
    for (Message& m : open_group->messages)
        if (m.to) fine &= !cudaMemcpyAsync(m.to, m.staged, m.bytes, cudaMemcpyHostToDevice, stream);
    return fine ? 0 : 1;
}
}
