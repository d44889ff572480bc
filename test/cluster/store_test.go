//go:build cluster

package cluster

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"path"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
)

// prefixes are where the API server keeps the objects of a kind in etcd.
var prefixes = map[string]string{"Service": "services/specs", "EndpointSlice": "endpointslices", "IPAddress": "ipaddresses"}

// put is a write in one of etcd's transactions, in its JSON form.
type put struct {
	Request struct {
		Key   []byte `json:"key"`
		Value []byte `json:"value"`
	} `json:"requestPut"`
}

var stored = protobuf.NewSerializer(nil, nil)

// mostPuts is less than the 128 writes that etcd takes in one transaction. Those of slices with a
// hundred endpoints have 1.5 MB at most together.
const mostPuts = 64

// keep writes complete objects into etcd, in the API server's own form. The API server would list all
// IPAddresses for each Service that it creates.
func (w *world) keep(objects ...object) error {
	for len(objects) > 0 {
		batch := objects[:min(mostPuts, len(objects))]
		objects = objects[len(batch):]
		puts := make([]put, len(batch))
		for i, o := range batch {
			gvks, _, err := w.admin.scheme.ObjectKinds(o)
			if err != nil {
				return err
			}
			o.GetObjectKind().SetGroupVersionKind(gvks[0])
			var value bytes.Buffer
			if err := stored.Encode(o, &value); err != nil {
				return err
			}
			puts[i].Request.Key = []byte(path.Join("/registry", prefixes[gvks[0].Kind], o.GetNamespace(), o.GetName()))
			puts[i].Request.Value = value.Bytes()
		}
		body, err := json.Marshal(map[string]any{"success": puts})
		if err != nil {
			return err
		}
		request, err := http.NewRequest(http.MethodPost, etcd+"/v3/kv/txn", bytes.NewReader(body))
		if err != nil {
			return err
		}
		if got, err := w.do(request); err != nil {
			return err
		} else if !strings.HasPrefix(got, "200 ") {
			return errors.New("etcd: " + got)
		}
	}
	return nil
}

// awaitKept waits until the API server serves an object of keep from its cache.
func (w *world) awaitKept(o object) {
	w.t.Helper()
	w.until("the API server has "+o.GetName(), func() error {
		return w.admin.request("GET", o).Param("resourceVersion", "0").Do(ctx).Error()
	})
}
