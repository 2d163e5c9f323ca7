// Package chaos holds a test only: clients of every kind connect to Services all the time,
// while the node's proxy, a process of its own, is killed, replaced, starved and damaged.
package chaos
