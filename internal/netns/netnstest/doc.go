// Package netnstest creates network namespaces for tests, and closes them.
package netnstest
