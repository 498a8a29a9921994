// User objects of graphs; see graph_api.hpp. A graph, its clones and what they are instantiated to share ownership.
#include <mutex>
#include <unordered_map>

#include "error.hpp"
#include "graph_api.hpp"
#include "process.hpp"

namespace simgpu {
namespace {

// The application's own references; the graphs' are shares of `owner`.
struct UserObject {
    std::shared_ptr<void> owner;
    unsigned references = 0;
};

std::mutex &objects_mutex() {
    static auto *mutex = new std::mutex;
    return *mutex;
}

std::unordered_map<CUuserObject, UserObject> &objects() {
    static auto *table = new std::unordered_map<CUuserObject, UserObject>;
    return *table;
}

UserObject &object_argument(CUuserObject handle) {
    auto it = objects().find(handle);
    require(it != objects().end());
    return it->second;
}

} // namespace

CUuserObject create_user_object(void *pointer, CUhostFn destroy, unsigned references) {
    struct Handle {
        void *pointer;
        CUhostFn destroy;
        ~Handle() {
            CallbackScope scope;
            destroy(pointer);
        }
    };
    auto owner = std::shared_ptr<Handle>(new Handle{pointer, destroy});
    auto handle = reinterpret_cast<CUuserObject>(owner.get());
    std::lock_guard lock(objects_mutex());
    objects()[handle] = {owner, references};
    return handle;
}

void retain_user_object(CUuserObject object, unsigned count) {
    std::lock_guard lock(objects_mutex());
    object_argument(object).references += count;
}

void release_user_object(CUuserObject object, unsigned count) {
    std::shared_ptr<void> last; // destroyed outside of the lock
    std::lock_guard lock(objects_mutex());
    UserObject &entry = object_argument(object);
    require(count <= entry.references);
    entry.references -= count;
    if (entry.references > 0)
        return;
    last = std::move(entry.owner);
    objects().erase(object);
}

void give_user_object(Graph &graph, CUuserObject object, unsigned count, unsigned flags) {
    std::shared_ptr<void> owner;
    {
        std::lock_guard lock(objects_mutex());
        owner = object_argument(object).owner;
    }
    for (unsigned i = 0; i < count; ++i)
        graph.user_objects.push_back(owner);
    if ((flags & CU_GRAPH_USER_OBJECT_MOVE) != 0)
        release_user_object(object, count);
}

void take_user_object(Graph &graph, CUuserObject object, unsigned count) {
    for (unsigned i = 0; i < count; ++i) {
        auto it = std::find_if(graph.user_objects.begin(), graph.user_objects.end(), [object](const auto &owner) {
            return reinterpret_cast<CUuserObject>(owner.get()) == object;
        });
        require(it != graph.user_objects.end());
        graph.user_objects.erase(it);
    }
}

} // namespace simgpu
