// Package refusals sends packets that must not get through, from every place to every kind of
// address of every kind of Service, and counts what arrives. Package oracle says what should become
// of each packet. Each packet is real, has a number in its payload, and is followed by one that must
// arrive on the same path. It has only tests.
package refusals
