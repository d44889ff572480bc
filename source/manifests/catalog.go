package manifests

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/service"
)

// catalog merges the contents of all files: it decides which object of a name is in
// force, makes slices from Endpoints, and computes the difference to the last time.
// It belongs to one goroutine.
type catalog struct {
	files  map[string][]object // by file
	claims map[objectKey][]claim
	// inForce holds what the receiver of changes knows.
	inForce map[objectKey]metav1.Object
	// slices counts the slices in the manifests by service; a service that
	// has one is not mirrored.
	slices map[service.Name]int
	// own holds Services as the manifests have them, without addresses that were given.
	own map[objectKey]metav1.Object
	// mirrored holds the slices made from Endpoints, by the Endpoints' name.
	mirrored map[service.Name]map[objectKey]metav1.Object
	count    map[kind]int // objects in force, as the manifests have them

	dirty   map[objectKey]bool // whose claims changed since the last commit
	told    map[objectKey][]string
	tooMany map[service.Name]int
	commits uint64

	belonging belonging
	addresses allocator
}

// claim is an object of a file; one claim of each name is in force.
type claim struct {
	file  string
	since uint64 // the commit with which the file first had an object of this name
	object
}

func newCatalog(ranges []netip.Prefix) *catalog {
	return &catalog{
		files:    make(map[string][]object),
		claims:   make(map[objectKey][]claim),
		inForce:  make(map[objectKey]metav1.Object),
		own:      make(map[objectKey]metav1.Object),
		slices:   make(map[service.Name]int),
		mirrored: make(map[service.Name]map[objectKey]metav1.Object),
		count:    make(map[kind]int),
		dirty:    make(map[objectKey]bool),
		told:     make(map[objectKey][]string),
		tooMany:  make(map[service.Name]int),

		addresses: newAllocator(ranges),

		belonging: newBelonging(),
	}
}

// set replaces the objects of a file; an empty list removes them.
func (c *catalog) set(file string, objects []object) {
	since := make(map[objectKey]uint64, len(objects))
	for _, o := range c.files[file] {
		c.claims[o.key] = slices.DeleteFunc(c.claims[o.key], func(cl claim) bool {
			if cl.file == file {
				since[o.key] = cl.since
			}
			return cl.file == file
		})
		c.dirty[o.key] = true
	}
	for _, o := range objects {
		first, had := since[o.key]
		if !had {
			first = c.commits
		}
		c.claims[o.key] = append(c.claims[o.key], claim{file, first, o})
		c.dirty[o.key] = true
	}
	if len(objects) == 0 {
		delete(c.files, file)
	} else {
		c.files[file] = objects
	}
}

// commit returns what changed since the last commit, and the new findings: of
// several objects with one name, the one that came first is in force, of those that
// came at once the first in the order of paths; each other one is a finding, once.
func (c *catalog) commit() (service.Change, []finding) {
	var change service.Change
	var findings []finding
	remirror := make(map[service.Name]bool)
	keys := slices.SortedFunc(maps.Keys(c.dirty), compareKeys)
	c.noteAddresses(keys)
	for _, k := range keys {
		claims := c.claims[k]
		sortClaims(claims)
		findings = append(findings, c.losers(k, claims)...)
		var value metav1.Object
		if len(claims) > 0 {
			value = c.complete(k, claims[0].value)
		} else {
			delete(c.claims, k)
			if k.kind == kindService {
				c.addresses.release(k.Name)
			}
		}
		c.put(&change, k, value, remirror)
	}
	clear(c.dirty)
	c.commits++
	for _, name := range slices.SortedFunc(maps.Keys(remirror), service.Name.Compare) {
		findings = append(findings, c.mirror(&change, name)...)
	}
	return change, findings
}

// noteAddresses counts the cluster IPs of the Services that changed, before any is given.
func (c *catalog) noteAddresses(keys []objectKey) {
	for _, k := range keys {
		if k.kind != kindService || len(c.addresses.ranges) == 0 {
			continue
		}
		if old, ok := c.own[k].(*corev1.Service); ok {
			c.addresses.note(old, -1)
			delete(c.own, k)
		}
		if claims := c.claims[k]; len(claims) > 0 {
			sortClaims(claims)
			c.own[k] = claims[0].value
			c.addresses.note(claims[0].value.(*corev1.Service), 1)
		}
	}
}

// complete gives a Service cluster IPs.
func (c *catalog) complete(k objectKey, value metav1.Object) metav1.Object {
	if svc, ok := value.(*corev1.Service); ok {
		return c.addresses.assign(k.Name, svc)
	}
	return value
}

// sortClaims puts the claim first that is in force.
func sortClaims(claims []claim) {
	slices.SortStableFunc(claims, func(a, b claim) int {
		return cmp.Or(cmp.Compare(a.since, b.since), cmp.Compare(a.file, b.file), cmp.Compare(a.line, b.line))
	})
}

// put makes value, nil for none, the object of a name.
func (c *catalog) put(change *service.Change, k objectKey, value metav1.Object, remirror map[service.Name]bool) {
	old := c.inForce[k]
	if old == nil && value == nil || old != nil && value != nil && (old == value || reflect.DeepEqual(old, value)) {
		return
	}
	for i, v := range []metav1.Object{old, value} {
		if v == nil {
			continue
		}
		step := 2*i - 1 // the old one goes, the new one comes
		c.count[k.kind] += step
		switch k.kind {
		case kindEndpointSlice:
			name := service.Name{Namespace: k.Namespace, Name: v.GetLabels()[discoveryv1.LabelServiceName]}
			if c.slices[name] += step; c.slices[name] == 0 {
				delete(c.slices, name)
			}
			remirror[name] = true
		case kindEndpoints, kindService:
			remirror[k.Name] = true
		}
	}
	c.belonging.changed(k, old, value)
	if value == nil {
		delete(c.inForce, k)
	} else {
		c.inForce[k] = value
	}
	record(change, k, value)
}

// mirror brings the slices made from Endpoints up to date.
func (c *catalog) mirror(change *service.Change, name service.Name) []finding {
	var want []*discoveryv1.EndpointSlice
	var findings []finding
	left := 0
	key := objectKey{kindEndpoints, name}
	if c.slices[name] == 0 {
		if svc, ok := c.inForce[objectKey{kindService, name}].(*corev1.Service); ok {
			want = askedSlices(svc)
		}
		if e, ok := c.inForce[key].(*endpoints); ok && want == nil {
			want, left = mirror(e)
		}
	}
	if left > 0 && left != c.tooMany[name] {
		cl := c.claims[key][0]
		findings = append(findings, finding{file: cl.file, line: cl.line, object: key.String(), warning: true,
			text: fmt.Sprintf("subsets: %d addresses are left out: %d in one subset is the limit", left, maxEndpoints)})
	}
	if left == 0 {
		delete(c.tooMany, name)
	} else {
		c.tooMany[name] = left
	}
	had := c.mirrored[name]
	has := make(map[objectKey]metav1.Object, len(want))
	for _, s := range want {
		k := objectKey{kindEndpointSlice, service.Name{Namespace: s.Namespace, Name: s.Name}}
		if old, ok := had[k]; ok && reflect.DeepEqual(old, s) {
			has[k] = old
			continue
		}
		has[k] = s
		record(change, k, s)
	}
	for k := range had {
		if _, ok := has[k]; !ok && c.inForce[k] == nil {
			record(change, k, nil)
		}
	}
	if len(has) == 0 {
		delete(c.mirrored, name)
	} else {
		c.mirrored[name] = has
	}
	return findings
}

// record adds an object, or nil for a deleted one, to a change. Endpoints are not
// part of the model.
func record(change *service.Change, k objectKey, value metav1.Object) {
	if svc, ok := value.(*corev1.Service); ok {
		value = withoutAsked(svc)
	}
	if k.kind != kindEndpoints {
		change.Put(service.ObjectKey{Kind: kinds[k.kind].model, Name: k.Name}, value)
	}
}

// losers returns findings about claims that are not in force, unless the last commit
// had them.
func (c *catalog) losers(k objectKey, claims []claim) []finding {
	if len(claims) < 2 {
		delete(c.told, k)
		return nil
	}
	var findings []finding
	var texts []string
	for _, cl := range claims[1:] {
		f := finding{file: cl.file, line: cl.line, object: k.String(), warning: true,
			text: fmt.Sprintf("is already in %s:%d, which is used; this one is left out: take one away", claims[0].file, claims[0].line)}
		text := f.String()
		texts = append(texts, text)
		if !slices.Contains(c.told[k], text) {
			findings = append(findings, f)
		}
	}
	c.told[k] = texts
	return findings
}

func compareKeys(a, b objectKey) int {
	return cmp.Or(cmp.Compare(a.kind, b.kind), a.Name.Compare(b.Name))
}
