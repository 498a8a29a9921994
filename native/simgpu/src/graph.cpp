// See graph.hpp.
#include "graph.hpp"

#include <algorithm>

#include "error.hpp"
#include "event.hpp"
#include "submit.hpp"

namespace simgpu {

HandleTable<Graph> &graphs() {
    static auto *table = new HandleTable<Graph>;
    return *table;
}

HandleTable<GraphNode> &graph_nodes() {
    static auto *table = new HandleTable<GraphNode>;
    return *table;
}

HandleTable<GraphExec> &graph_execs() {
    static auto *table = new HandleTable<GraphExec>;
    return *table;
}

Graph::~Graph() {
    for (const auto &node : nodes)
        graph_nodes().remove(node.get());
}

GraphNode *Graph::add(std::shared_ptr<Work> work, const std::vector<GraphNode *> &dependencies) {
    for (const GraphNode *node : dependencies)
        require(owns(node));
    auto node = std::make_shared<GraphNode>();
    node->graph = this;
    node->work = std::move(work);
    nodes.push_back(node);
    graph_nodes().add(node);
    for (GraphNode *dependency : dependencies)
        connect(dependency, node.get());
    return node.get();
}

void Graph::remove(GraphNode *node) {
    for (GraphNode *other : std::vector<GraphNode *>(node->dependencies))
        disconnect(other, node);
    for (GraphNode *other : std::vector<GraphNode *>(node->dependents))
        disconnect(node, other);
    graph_nodes().remove(node);
    std::erase_if(nodes, [node](const auto &entry) { return entry.get() == node; });
}

void Graph::connect(GraphNode *from, GraphNode *to) {
    require(owns(from) && owns(to) && from != to);
    auto &known = to->dependencies;
    require(std::find(known.begin(), known.end(), from) == known.end());
    known.push_back(from);
    from->dependents.push_back(to);
}

void Graph::disconnect(GraphNode *from, GraphNode *to) {
    require(owns(from) && owns(to));
    require(std::erase(to->dependencies, from) == 1);
    std::erase(from->dependents, to);
}

std::vector<GraphNode *> Graph::ordered() const {
    std::unordered_map<const GraphNode *, size_t> missing;
    std::vector<GraphNode *> order;
    for (const auto &node : nodes) {
        missing[node.get()] = node->dependencies.size();
        if (node->dependencies.empty())
            order.push_back(node.get());
    }
    for (size_t next = 0; next < order.size(); ++next) {
        for (GraphNode *dependent : order[next]->dependents) {
            if (--missing[dependent] == 0)
                order.push_back(dependent);
        }
    }
    require(order.size() == nodes.size());
    return order;
}

std::shared_ptr<Graph> Graph::clone() const {
    auto copy = std::make_shared<Graph>();
    std::unordered_map<const GraphNode *, GraphNode *> twins;
    for (const auto &node : nodes) {
        std::shared_ptr<Work> work = node->work;
        if (auto nested = std::dynamic_pointer_cast<ChildGraphWork>(work)) {
            work = std::make_shared<ChildGraphWork>(nested->graph->clone());
        }
        GraphNode *twin = copy->add(std::move(work), {});
        twin->cloned_from = node.get();
        twins[node.get()] = twin;
    }
    for (const auto &node : nodes) {
        for (const GraphNode *dependency : node->dependencies)
            copy->connect(twins[dependency], twins[node.get()]);
    }
    copy->user_objects = user_objects;
    return copy;
}

GraphExec::Entry *GraphExec::find(CUgraphNode node) {
    for (Entry &entry : entries) {
        if (entry.source == reinterpret_cast<const GraphNode *>(node))
            return &entry;
    }
    return nullptr;
}

std::shared_ptr<GraphExec> instantiate(const Graph &graph, unsigned long long flags) {
    auto exec = std::make_shared<GraphExec>();
    exec->flags = flags;
    exec->shape = graph.clone();
    auto order = graph.ordered();
    std::unordered_map<const GraphNode *, std::shared_ptr<Work>> copies;
    for (const auto &twin : exec->shape->nodes)
        copies[twin->cloned_from] = twin->work;
    for (const GraphNode *node : order)
        exec->entries.push_back({node, copies[node], true});
    return exec;
}

void launch_graph(GraphExec &exec, Stream &stream) {
    std::vector<Ticket> dependencies;
    std::vector<std::shared_ptr<EventRecordWork>> records;
    auto list = std::make_shared<GraphLaunchWork::List>();
    {
        std::lock_guard lock(exec.mutex);
        for (const GraphExec::Entry &entry : exec.entries) {
            if (!entry.enabled)
                continue;
            if (auto wait = std::dynamic_pointer_cast<EventWaitWork>(entry.work)) {
                dependencies.push_back(event_ticket(*wait->event));
            } else if (auto record = std::dynamic_pointer_cast<EventRecordWork>(entry.work)) {
                // The event's time is that of its place in the graph; its completion is that of the whole launch.
                auto own = std::make_shared<EventRecordWork>(record->event, std::make_shared<EventRecord>());
                records.push_back(own);
                list->push_back(own);
                continue;
            }
            list->push_back(entry.work);
        }
    }
    Ticket ticket = submit(stream, std::make_shared<GraphLaunchWork>(list), std::move(dependencies));
    for (const auto &record : records) {
        std::lock_guard lock(record->event->mutex);
        record->record->ticket = ticket;
        record->event->record = record->record;
        record->event->capture.reset();
    }
}

} // namespace simgpu
