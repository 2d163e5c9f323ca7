// Package proxier is what all engines share: the Provider that an embedding
// program feeds with events, and the driver that turns them into Updates for an
// Engine.
package proxier
