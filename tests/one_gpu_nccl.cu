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

struct Id {
    char bytes[128];
};
struct Mailbox {
    std::atomic<uint32_t> bytes;
    char data[1 << 20];
};
struct Message {
    int peer;
    const void* from;
    void* to;
    size_t bytes;
    char* staged;     // on the host
    size_t done = 0;  // of a run
};
struct Group {
    std::vector<Message> messages;
};

static int rank_here, ranks, depth;
static Mailbox* boxes;            // (ranks, ranks): from the first to the second
static std::atomic<int>* pids;    // (ranks), behind the boxes; 0 before and after a rank takes part
static char* staging;  // all groups' messages, one group after the other: they share a stream
static size_t staged;
static const size_t STAGING = (size_t)1 << 30;
static Group* open_group;
static cudaStream_t stream;

static Mailbox& box(int from, int to) { return boxes[from * ranks + to]; }

// Moves what the messages hold between the staging memories of the ranks.
static void CUDART_CB deliver(void* group) {
    std::vector<Message>& messages = ((Group*)group)->messages;
    for (Message& m : messages) m.done = 0;
    for (bool all = false; !all; sched_yield()) {
        std::vector<bool> sends(ranks), receives(ranks);
        all = true;
        for (Message& m : messages) {
            Mailbox& b = m.from ? box(rank_here, m.peer) : box(m.peer, rank_here);
            std::vector<bool>& busy = m.from ? sends : receives;
            if (!busy[m.peer] && m.done < m.bytes && m.from && !b.bytes) {
                size_t n = std::min(sizeof b.data, m.bytes - m.done);
                memcpy(b.data, m.staged + m.done, n);
                m.done += n, b.bytes = (uint32_t)n;
            } else if (!busy[m.peer] && m.done < m.bytes && m.to && b.bytes) {
                memcpy(m.staged + m.done, b.data, b.bytes);
                m.done += b.bytes, b.bytes = 0;
            }
            busy[m.peer] = busy[m.peer] || m.done < m.bytes;
            all = all && m.done == m.bytes;
        }
    }
}

static int add(int peer, const void* from, void* to, size_t bytes, cudaStream_t on) {
    stream = on;
    if (staged + bytes > STAGING) return fprintf(stderr, "one_gpu_nccl: too much is exchanged\n"), 1;
    open_group->messages.push_back({peer, from, to, bytes, staging + staged});
    staged += (bytes + 255) / 256 * 256;
    return 0;
}

extern "C" {
int ncclGetVersion(int* version) { return *version = 99999, 0; }
int ncclGetUniqueId(Id* id) { return snprintf(id->bytes, sizeof id->bytes, "/one_gpu_nccl_%d", getpid()), 0; }
int ncclCommInitRank(void** comm, int size, Id id, int rank) {
    const char* host = getenv("NCCL_COMM_ID");  // the same for all, as NCCL takes it
    std::string name = host ? std::string("/one_gpu_nccl_") + host : id.bytes;
    rank_here = rank, ranks = size;
    size_t bytes = (size_t)size * size * sizeof(Mailbox) + (size + 1) * sizeof(std::atomic<int>);
    int file = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, (off_t)bytes)) return 2;
    boxes = (Mailbox*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    pids = (std::atomic<int>*)(boxes + size * size);
    pids[rank] = getpid();
    auto& arrived = pids[size];
    for (arrived++; arrived < size;) usleep(1000);
    shm_unlink(name.c_str());
    *comm = boxes;
    return cudaMallocHost((void**)&staging, STAGING) == cudaSuccess ? 0 : 1;
}
int ncclCommGetAsyncError(void*, int* status) {
    *status = 0;
    for (int rank = 0; rank < ranks; rank++)
        if (int pid = pids[rank]; pid && kill(pid, 0)) *status = 6;  // ncclRemoteError
    return 0;
}
int ncclCommFinalize(void*) { return pids[rank_here] = 0, 0; }
int ncclCommDestroy(void*) { return 0; }
int ncclGroupStart() {
    if (!depth++) open_group = new Group, staged = 0;  // it stays, since a recorded graph replays it
    return 0;
}
int ncclSend(const void* from, size_t bytes, int, int peer, void*, cudaStream_t on) {
    return add(peer, from, nullptr, bytes, on);
}
int ncclRecv(void* to, size_t bytes, int, int peer, void*, cudaStream_t on) {
    return add(peer, nullptr, to, bytes, on);
}
int ncclGroupEnd() {
    if (--depth || open_group->messages.empty()) return 0;
    bool fine = true;
    for (Message& m : open_group->messages)
        if (m.from) fine &= !cudaMemcpyAsync(m.staged, m.from, m.bytes, cudaMemcpyDeviceToHost, stream);
    fine &= !cudaLaunchHostFunc(stream, deliver, open_group);
    for (Message& m : open_group->messages)
        if (m.to) fine &= !cudaMemcpyAsync(m.to, m.staged, m.bytes, cudaMemcpyHostToDevice, stream);
    return fine ? 0 : 1;
}
}
