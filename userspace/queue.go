package userspace

import "container/heap"

// absent is the index of an item that is in no queue.
const absent = -1

// queued is an item that stores its index in a queue.
type queued[T any] interface {
	before(other T) bool
	index() *int
}

// queue is a priority queue. It implements heap.Interface.
type queue[T queued[T]] []T

func (q queue[T]) Len() int           { return len(q) }
func (q queue[T]) Less(i, j int) bool { return q[i].before(q[j]) }
func (q queue[T]) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	*q[i].index(), *q[j].index() = i, j
}

// Push implements heap.Interface.
func (q *queue[T]) Push(x any) {
	item, _ := x.(T)
	*item.index() = len(*q)
	*q = append(*q, item)
}

// Pop implements heap.Interface.
func (q *queue[T]) Pop() any {
	last := len(*q) - 1
	item := (*q)[last]
	(*q)[last] = *new(T)
	*q = (*q)[:last]
	return item
}

// update puts an item into the queue, or moves it to its new position.
func (q *queue[T]) update(item T) {
	if i := *item.index(); i != absent {
		heap.Fix(q, i)
		return
	}
	heap.Push(q, item)
}
