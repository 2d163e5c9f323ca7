// Package guard holds the tests that keep the architecture: what the packages
// may import.
package guard
