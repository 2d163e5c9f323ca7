// Package soak holds a test only: a proxy that runs for a long time leaves nothing behind.
// Services come, change and go by the million, while clients connect, and then memory,
// goroutines, descriptors, kernel objects and connection tracking are what they were in the
// beginning, and what a new proxy makes of the same objects.
package soak
